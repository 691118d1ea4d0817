#include "reduce.h"

#include <algorithm>
#include <cfloat>

#include "elements.h"

namespace kvspan {
namespace {

constexpr std::int64_t BLOCK = 256;  // floats that are summed at a time
constexpr std::int64_t MERGED = 64;  // likewise, and few enough to stay in registers

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
        const auto part = [&](int rank) {
            return reinterpret_cast<const Stored<Element>*>(parts[rank]) + begin;
        };
        for (std::int64_t k = 0; k < size; ++k) total[k] = Element::widen(part(0)[k]);
        for (int r = 1; r < ranks; ++r) {
            const auto* other = part(r);
            for (std::int64_t k = 0; k < size; ++k) total[k] += Element::widen(other[k]);
        }
        round_block<Element>(total, size, out + begin);
    }
}

// `size` columns of one head, from `begin` on; a weight of 0 silences even NaN.
template <class Element>
KVSPAN_INLINE void merge_block(const ShardedRow& row, const float* weights, std::int64_t stride,
                               std::int64_t begin, std::int64_t size, Stored<Element>* out) {
    float total[MERGED];
    for (std::int64_t k = 0; k < size; ++k) total[k] = 0;
    for (int r = 0; r < row.ranks; ++r) {
        const float weight = weights[r * stride];
        if (weight == 0) continue;
        const auto* part = reinterpret_cast<const Stored<Element>*>(row.values[r]) + begin;
        for (std::int64_t k = 0; k < size; ++k) total[k] += weight * Element::widen(part[k]);
    }
    round_block<Element>(total, size, out + begin);
}

template <class Element>
KVSPAN_INLINE void merge_as(const ShardedRow& row, std::byte* to) {
    auto* out = reinterpret_cast<Stored<Element>*>(to);
    const float* const weights = row.weights;
    const std::int64_t heads = row.heads(), stride = row.weight_stride;
    std::int64_t begin = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t end = std::min(row.columns, (h + 1) * row.head_dim - row.first_column);
        for (; begin + MERGED <= end; begin += MERGED) {
            // A size that compilers know.
            merge_block<Element>(row, weights + h, stride, begin, MERGED, out);
        }
        merge_block<Element>(row, weights + h, stride, begin, end - begin, out);
        begin = end;
    }
}

// A version for each instruction set is made of functions, not of templates.
#define KVSPAN_REDUCE(Element)                                                                     \
    KVSPAN_CLONES void sum_##Element(const std::byte* const* parts, int ranks, std::int64_t count, \
                                     std::byte* out) {                                             \
        sum_as<Element>(parts, ranks, count, out);                                                 \
    }                                                                                              \
    KVSPAN_CLONES void merge_##Element(const ShardedRow& row, std::byte* out) {                    \
        merge_as<Element>(row, out);                                                               \
    }

KVSPAN_REDUCE(AsF32)
KVSPAN_REDUCE(AsBf16)
KVSPAN_REDUCE(AsF16)

}  // namespace

KVSPAN_CLONES void find_weights(const float* lse, int ranks, std::int64_t count, float* weights) {
    float* const largest = weights + ranks * count;
    float* const total = largest + count;
    for (std::int64_t i = 0; i < count; ++i) {
        largest[i] = -FLT_MAX;
        total[i] = FLT_MIN;  // nothing beside the 1 of the largest, and never a division by 0
    }
    for (int r = 0; r < ranks; ++r) {
        const float* const its = lse + r * count;
        for (std::int64_t i = 0; i < count; ++i) {
            const bool larger = its[i] > largest[i] && its[i] <= FLT_MAX;
            largest[i] = larger ? its[i] : largest[i];
        }
    }
    for (int r = 0; r < ranks; ++r) {
        const float* const its = lse + r * count;
        float* const weight = weights + r * count;
        for (std::int64_t i = 0; i < count; ++i) {
            const bool saw = its[i] >= -FLT_MAX && its[i] <= FLT_MAX;
            weight[i] = saw ? exp_of(its[i] - largest[i]) : 0.0f;
            total[i] += weight[i];
        }
    }
    for (int r = 0; r < ranks; ++r) {
        for (std::int64_t i = 0; i < count; ++i) weights[r * count + i] /= total[i];
    }
}

void sum(Dtype dtype, const std::byte* const* parts, int ranks, std::int64_t count, std::byte* out) {
    const auto run = dtype == Dtype::f32 ? sum_AsF32 : dtype == Dtype::bf16 ? sum_AsBf16 : sum_AsF16;
    run(parts, ranks, count, out);
}

void merge(const ShardedRow& row, std::byte* out) {
    const auto run = row.dtype == Dtype::f32    ? merge_AsF32
                     : row.dtype == Dtype::bf16 ? merge_AsBf16
                                                : merge_AsF16;
    run(row, out);
}

}  // namespace kvspan
