// Products of each head's vectors with a matrix of its own, which lies as it was loaded. Of few rows the
// time is that of reading the matrices, once for all rows of a task.
#pragma once

#include <cstdint>

namespace kvspan {

constexpr int HEAD_ROWS = 8;       // of a task
constexpr int SUMMED_PIECE = 512;  // outputs of a task, which are columns of the matrix
constexpr int DOTTED_PIECE = 32;   // likewise, which are its rows

// x [rows, heads, inputs] -> out [rows, heads, outputs], contiguous. Strides in elements; all of one
// dtype, sums are made in float32.
struct HeadProduct {
    const void* x;
    std::int64_t rows, row_stride, head_stride;
    int heads, inputs, outputs;
    const void* weight;  // of each head [inputs, outputs] for sums, [outputs, inputs] for dots
    std::int64_t weight_head_stride, weight_row_stride;
    void* out;
};

// Some outputs of a head for some rows.
struct HeadTask {
    int head, first, outputs, rows;
    std::int64_t row;
};

struct HeadKernels {
    void (*sums)(const HeadProduct&, const HeadTask&);
    void (*dots)(const HeadProduct&, const HeadTask&);
};

// The matrix's rows, each times an element of x, summed; on at most `threads` threads.
void sum_rows(const HeadProduct& call, const HeadKernels& kernels, int threads);

// Dot products of x with the matrix's rows.
void dot_rows(const HeadProduct& call, const HeadKernels& kernels, int threads);

}  // namespace kvspan
