#include "share.h"

#include <algorithm>

#include "elements.h"
#include "reduce.h"

namespace kvspan {
namespace {

template <class Element>
KVSPAN_INLINE void weigh_as(const std::byte* from, std::int64_t count, float weight, float* to) {
    const auto* const values = reinterpret_cast<const typename Element::Stored*>(from);
    for (std::int64_t k = 0; k < count; ++k) to[k] = weight * Element::widen(values[k]);
}

template <class Element>
KVSPAN_INLINE void round_as(const float* from, std::int64_t count, std::byte* to) {
    auto* const values = reinterpret_cast<typename Element::Stored*>(to);
    for (std::int64_t k = 0; k < count; ++k) values[k] = Element::round(from[k]);
}

// A version for each instruction set is made of functions, not of templates.
#define KVSPAN_SHARE(Element)                                                                       \
    KVSPAN_CLONES void weigh_##Element(const std::byte* from, std::int64_t count, float weight,     \
                                       float* to) {                                                 \
        weigh_as<Element>(from, count, weight, to);                                                 \
    }                                                                                               \
    KVSPAN_CLONES void round_##Element(const float* from, std::int64_t count, std::byte* to) {      \
        round_as<Element>(from, count, to);                                                         \
    }

KVSPAN_SHARE(AsF32)
KVSPAN_SHARE(AsBf16)
KVSPAN_SHARE(AsF16)

// `count` elements; a weight of 0 silences even NaN.
void weigh(Dtype dtype, const std::byte* from, std::int64_t count, float weight, float* to) {
    if (weight == 0) {
        std::fill_n(to, count, 0.0f);
        return;
    }
    const auto run = dtype == Dtype::f32    ? weigh_AsF32
                     : dtype == Dtype::bf16 ? weigh_AsBf16
                                            : weigh_AsF16;
    run(from, count, weight, to);
}

}  // namespace

void take_share(const Share& call) {
    find_weights(call.lse, call.ranks, call.rows * call.heads, call.weights);
    const float* const weights = call.weights + call.rank * call.rows * call.heads;
    float* to = call.to;
    for (const Piece& piece : call.pieces) {
        const std::int64_t stop = piece.first_column + piece.num_columns;
        for (std::int64_t i = 0; i < piece.num_rows; ++i) {
            const std::int64_t row = piece.rows ? piece.rows[i] : piece.first_row + i;
            for (std::int64_t column = piece.first_column; column < stop;) {
                const std::int64_t head = row * call.heads + column / call.head_dim;
                const std::int64_t at = column % call.head_dim;
                const std::int64_t count = std::min(call.head_dim - at, stop - column);
                const std::int64_t element = head * call.head_dim + at;
                weigh(call.dtype, call.out + element * bytes_of(call.dtype), count, weights[head], to);
                column += count, to += count;
            }
        }
    }
}

void round_to(Dtype dtype, const float* from, std::int64_t count, std::byte* to) {
    const auto run = dtype == Dtype::f32    ? round_AsF32
                     : dtype == Dtype::bf16 ? round_AsBf16
                                            : round_AsF16;
    run(from, count, to);
}

}  // namespace kvspan
