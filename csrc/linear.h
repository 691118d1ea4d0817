// A linear layer on few rows of bf16: reading the weights once is all that it costs.
#pragma once

#include <cstdint>

namespace kvspan {

// out[r][n] = sum_k input[r][k] weight[n][k] + bias[n]; sums are made in float32. Strides in elements.
struct Linear {
    const void* input;
    std::int64_t rows, input_stride;
    const void* weight;
    std::int64_t outputs, weight_stride, inputs;
    const void* bias;  // or null
    void* out;         // [rows, outputs], contiguous: bf16, or float32 if `wide`
    bool wide;
};

// Outputs [first, first + count) of all rows; `count` is at most LINEAR_PANEL.
using LinearKernel = void (*)(const Linear&, std::int64_t first, int count);
constexpr int LINEAR_PANEL = 16;

// All outputs, on at most `threads` threads.
void multiply(const Linear& call, LinearKernel kernel, int threads);

}  // namespace kvspan
