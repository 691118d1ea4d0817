#include "store.h"

#include <algorithm>
#include <cstring>

#include "elements.h"
#include "parallel.h"
#include "reduce.h"

namespace kvspan {
namespace {

constexpr std::int64_t RUN_BYTES = 1 << 16;  // of input: less is not worth a second thread
constexpr float I8_LIMIT = 127.0f, E4M3_LIMIT = 448.0f;

// To the nearest whole number, ties to even, for |x| <= 127.
KVSPAN_INLINE std::uint8_t to_i8(float x) {
    const float clamped = std::min(std::max(x, -I8_LIMIT), I8_LIMIT);
    const float shifted = clamped + 0x1.8p23f;  // the number fills the low bits
    return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(shifted));
}

// To the nearest e4m3, ties to even. An ulp of 2^14 is the smallest subnormal, so the addition rounds.
KVSPAN_INLINE std::uint8_t to_e4m3(float x) {
    const float clamped = std::min(std::max(x, -E4M3_LIMIT), E4M3_LIMIT);
    const auto bits = std::bit_cast<std::uint32_t>(clamped);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    const std::uint32_t tiny =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
    std::uint32_t code = magnitude < 0x3c800000u ? tiny : normal;
    code = x != x ? 0x7fu : code;
    return static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80u));
}

template <class Element>
KVSPAN_INLINE float largest_of(const typename Element::Stored* x, int dims) {
    std::uint32_t most = 0;  // magnitudes of floats are in order as numbers, those of NaN above all
    for (int d = 0; d < dims; ++d) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(Element::widen(x[d])) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return std::bit_cast<float>(most);
}

// Codes of one part of a vector; returns the scale's bf16.
template <class Element>
KVSPAN_INLINE std::uint16_t encode(const typename Element::Stored* x, int dims, bool is_i8,
                                   std::uint8_t* to) {
    const float largest = largest_of<Element>(x, dims);
    const std::uint16_t rounded = AsBf16::round(largest / (is_i8 ? I8_LIMIT : E4M3_LIMIT));
    const std::uint16_t scale = rounded == 0 ? AsBf16::round(1.0f) : rounded;
    const float divisor = AsBf16::widen(scale);
    if (is_i8) {
        for (int d = 0; d < dims; ++d) to[d] = to_i8(Element::widen(x[d]) / divisor);
    } else {
        for (int d = 0; d < dims; ++d) to[d] = to_e4m3(Element::widen(x[d]) / divisor);
    }
    return scale;
}

// A version for each instruction set is made of functions, not of templates.
#define KVSPAN_ENCODE(Element)                                                           \
    KVSPAN_CLONES std::uint16_t encode_##Element(const void* x, int dims, bool is_i8,    \
                                                 std::uint8_t* to) {                     \
        return encode<Element>(static_cast<const Element::Stored*>(x), dims, is_i8, to); \
    }

KVSPAN_ENCODE(AsF32)
KVSPAN_ENCODE(AsBf16)
KVSPAN_ENCODE(AsF16)

using Encode = std::uint16_t (*)(const void* x, int dims, bool is_i8, std::uint8_t* to);

Encode encoder(Dtype dtype) {
    return dtype == Dtype::f32 ? encode_AsF32 : dtype == Dtype::bf16 ? encode_AsBf16 : encode_AsF16;
}

void store_row(const Store& call, std::int64_t i) {
    if (call.blocks[i] < 0) return;
    const std::int64_t width = bytes_of(call.dtype);
    const auto* row = static_cast<const std::byte*>(call.rows) + i * call.row_stride * width;
    const std::int64_t slot = call.blocks[i] * call.block_stride + call.offsets[i] * call.slot_stride;
    auto* data = static_cast<std::byte*>(call.data);
    for (int head = 0; head < call.heads; ++head) {
        const std::byte* from = row + head * call.head_stride * width;
        const std::int64_t to = slot + head * call.slot_head_stride;
        if (!is_code(call.stored)) {
            std::memcpy(data + to * width, from, (call.part_dims[0] + call.part_dims[1]) * width);
            continue;
        }
        std::uint16_t* scale = call.scales + call.blocks[i] * call.scale_block_stride +
                               head * call.scale_head_stride + call.offsets[i] * call.scale_slot_stride;
        auto* codes = reinterpret_cast<std::uint8_t*>(data) + to;
        for (const int dims : call.part_dims) {
            if (dims == 0) break;
            *scale++ = encoder(call.dtype)(from, dims, call.stored == Dtype::i8, codes);
            from += dims * width;
            codes += dims;
        }
    }
}

}  // namespace

void store(const Store& call, int threads) {
    const std::int64_t row_bytes =
        call.heads * (call.part_dims[0] + call.part_dims[1]) * bytes_of(call.dtype);
    const std::int64_t run = std::max<std::int64_t>(RUN_BYTES / std::max<std::int64_t>(row_bytes, 1), 1);
    parallel_for((call.count + run - 1) / run, threads, [&](std::int64_t n) {
        const std::int64_t stop = std::min(call.count, (n + 1) * run);
        for (std::int64_t i = n * run; i < stop; ++i) store_row(call, i);
    });
}

}  // namespace kvspan
