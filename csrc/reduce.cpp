#include "reduce.h"

#include <algorithm>

#include "elements.h"

namespace kvspan {
namespace {

constexpr std::int64_t BLOCK = 256;  // floats that are summed at a time

template <class Element>
using Stored = typename Element::Stored;

template <class Element>
KVSPAN_INLINE void round_block(const float* total, std::int64_t count, Stored<Element>* out) {
    for (std::int64_t k = 0; k < count; ++k) out[k] = Element::round(total[k]);
}

template <class Element>
KVSPAN_INLINE void sum_as(const std::byte* const* parts, int ranks, std::int64_t count, std::byte* to) {
    auto* out = reinterpret_cast<Stored<Element>*>(to);
    float total[BLOCK];
    for (std::int64_t begin = 0; begin < count; begin += BLOCK) {
        const std::int64_t size = std::min(BLOCK, count - begin);
        const auto part = [&](int rank) { return reinterpret_cast<const Stored<Element>*>(parts[rank]) + begin; };
        for (std::int64_t k = 0; k < size; ++k) total[k] = Element::widen(part(0)[k]);
        for (int r = 1; r < ranks; ++r) {
            const auto* other = part(r);
            for (std::int64_t k = 0; k < size; ++k) total[k] += Element::widen(other[k]);
        }
        round_block<Element>(total, size, out + begin);
    }
}

template <class Element>
KVSPAN_INLINE void weighted_sum_as(const std::byte* const* parts, const float* weights, int ranks,
                                   std::int64_t skipped, std::int64_t count, std::byte* to) {
    auto* out = reinterpret_cast<Stored<Element>*>(to);
    float total[BLOCK];
    for (std::int64_t begin = 0; begin < count; begin += BLOCK) {
        const std::int64_t size = std::min(BLOCK, count - begin);
        for (std::int64_t k = 0; k < size; ++k) total[k] = 0;
        for (int r = 0; r < ranks; ++r) {
            const float weight = weights[r];
            if (weight == 0) continue;
            const auto* part = reinterpret_cast<const Stored<Element>*>(parts[r] + skipped) + begin;
            for (std::int64_t k = 0; k < size; ++k) total[k] += weight * Element::widen(part[k]);
        }
        round_block<Element>(total, size, out + begin);
    }
}

// A version for each instruction set is made of functions, not of templates.
#define KVSPAN_REDUCE(Element)                                                                                     \
    KVSPAN_CLONES void sum_##Element(const std::byte* const* parts, int ranks, std::int64_t count, std::byte* out) { \
        sum_as<Element>(parts, ranks, count, out);                                                                 \
    }                                                                                                              \
    KVSPAN_CLONES void weighted_sum_##Element(const std::byte* const* parts, const float* weights, int ranks,      \
                                              std::int64_t skipped, std::int64_t count, std::byte* out) {          \
        weighted_sum_as<Element>(parts, weights, ranks, skipped, count, out);                                      \
    }

KVSPAN_REDUCE(AsF32)
KVSPAN_REDUCE(AsBf16)
KVSPAN_REDUCE(AsF16)

}  // namespace

void sum(Dtype dtype, const std::byte* const* parts, int ranks, std::int64_t count, std::byte* out) {
    const auto run = dtype == Dtype::f32 ? sum_AsF32 : dtype == Dtype::bf16 ? sum_AsBf16 : sum_AsF16;
    run(parts, ranks, count, out);
}

void weighted_sum(Dtype dtype, const std::byte* const* parts, const float* weights, int ranks, std::int64_t skipped,
                  std::int64_t count, std::byte* out) {
    const auto run = dtype == Dtype::f32    ? weighted_sum_AsF32
                     : dtype == Dtype::bf16 ? weighted_sum_AsBf16
                                            : weighted_sum_AsF16;
    run(parts, weights, ranks, skipped, count, out);
}

}  // namespace kvspan
