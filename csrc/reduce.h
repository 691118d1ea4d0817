// Sums and merges over ranks, in float32 and in order of rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace kvspan {

constexpr std::int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// out[k] = sum of parts[rank][k]; `out` may be one of `parts`.
void sum(Dtype dtype, const std::byte* const* parts, int ranks, std::int64_t count, std::byte* out);

// Each rank's share in the softmax over all keys, of some heads of some rows: `lse` and `weights` are
// [ranks, count]. An LSE that is not finite means that the rank saw no key; its share is 0. `weights`
// has room for (ranks + 2) * count.
void find_weights(const float* lse, int ranks, std::int64_t count, float* weights);

// A row of attention over shards of its keys, which each rank has attended to by itself.
struct ShardedRow {
    Dtype dtype;
    int ranks;
    const std::byte* const* values;  // of each rank, `columns` of them
    const float* weights;  // of each rank, of the heads that the columns touch
    std::int64_t weight_stride;  // from rank to rank
    std::int64_t first_column;  // where in the first head the columns begin
    std::int64_t columns, head_dim;

    std::int64_t heads() const { return (first_column + columns + head_dim - 1) / head_dim; }
};

// Merges a row into `out`; zeros where no rank saw a key.
void merge(const ShardedRow& row, std::byte* out);

}  // namespace kvspan
