// Weights to draw a token by: of a logit x what exp((x - greatest) / temperature) is, and nothing for
// one below `least`. Weights are not kept: whoever needs them makes them again, which is faster than
// memory. Counted coarsely they lie in octaves: octave i has those in [2^-i, 2^(1-i)), and octave 0 the
// greatest, 1.
#pragma once

#include <cstdint>

namespace kvspan {

constexpr int OCTAVES = 64;  // the last one has all that is smaller

struct Weights {
    const float* logits;
    std::int64_t rows, stride, size;
    const double* greatest;  // [rows] logits; finite
    const double* temperature;
    const double* least;  // weights
};

// The sum of each row's weights, [rows].
void totals(const Weights& call, double* sums, int threads);

// Sums and counts [rows, OCTAVES] of the weights that are not 0.
void octaves(const Weights& call, double* sums, std::int64_t* counts, int threads);

// Places and weights of those of octaves 0 .. `last[row]`, in order: a row's begin at `first[row]`.
void collect(const Weights& call, const std::int64_t* last, const std::int64_t* first,
             std::int64_t* places, double* weights, int threads);

// The first place at which the running sum of a row's weights passes `goals[row]`; if rounding hides
// it, the last one that has a weight; -1 if there is none, or the goal is below 0.
void pick(const Weights& call, const double* goals, std::int64_t* places, int threads);

}  // namespace kvspan
