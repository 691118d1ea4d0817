// Routed experts in bf16 for few rows: of each expert that a row has chosen the weights are read once,
// and of the others not at all. Which ones that are is read when the call is made. A row of zeros, as
// idle ones are, has chosen none: experts have no biases, and make zeros of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace kvspan {

// The experts that a rank keeps, or its part of their inner dim; all alike, one behind the other.
struct Experts {
    std::int64_t first, count;             // numbers of the experts kept
    std::int64_t hidden, inner;            // an expert is hidden -> inner, gated, -> hidden
    std::int64_t first_inner, some_inner;  // of inner, what is used: from the first of a panel on
    const std::byte *gate_up, *down;       // panels of `linear.h`
    LinearKernel kernel;

    Linear gate_up_of(std::int64_t expert) const;
    Linear down_of(std::int64_t expert) const;
};

// out[r] = sum over a row's experts that are kept of weight * expert(x[r]), in order of the experts,
// plus shared[r], which may be weighed by the sigmoid of a gate. Sums are made in float32 and rounded
// once.
struct Visits {
    const void* x;
    std::int64_t rows, row_stride;
    const std::int64_t* chosen;  // [rows, per_row], numbers of experts
    const float* weights;        // [rows, per_row]
    int per_row;
    const void* shared;  // [rows, hidden] bf16, or null
    const void* gate;    // [rows] bf16, or null: all of `shared`
    void* gathered;      // room for rows * per_row times hidden bf16
    void* inner;         // and times inner
    void* out;           // [rows, hidden] bf16
};

void visit(const Experts& experts, const Visits& call, int threads);

}  // namespace kvspan
