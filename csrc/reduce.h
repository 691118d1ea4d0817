// Sums over ranks, in float32 and in order of rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace kvspan {

constexpr std::int64_t bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// out[k] = sum of parts[rank][k]; `out` may be one of `parts`.
void sum(Dtype dtype, const std::byte* const* parts, int ranks, std::int64_t count, std::byte* out);

// out[k] = sum of weights[rank] * parts[rank][k], each part `skipped` bytes on; a weight of 0 silences even NaN.
void weighted_sum(Dtype dtype, const std::byte* const* parts, const float* weights, int ranks, std::int64_t skipped,
                  std::int64_t count, std::byte* out);

}  // namespace kvspan
