// A linear layer in bf16, its weight in panels: one form for few rows, where reading the weight is all
// that it costs, and for many, where arithmetic is.
#pragma once

#include <cstdint>

namespace kvspan {

constexpr int LINEAR_PANEL = 32;  // outputs of a panel

// out[r][n] = sum_k input[r][k] weight[n][k] + bias[n]; sums are made in float32. Strides in elements.
//
// A gated layer has two such sums for an output, gate and up, and gives silu(gate) * up. A panel of it
// has the gates of half as many outputs, and after them their ups.
struct Linear {
    const void* input;
    std::int64_t rows, input_stride;
    const void* weight;  // [panels][pairs of inputs][LINEAR_PANEL][2], zeros past outputs and inputs
    std::int64_t outputs, inputs;
    std::int64_t panel_pairs;  // from a panel to the next: more than `pairs()` of some of the inputs
    const void* bias;          // or null
    const void* up_bias;       // of a gated layer: where those of the ups begin, or null
    void* out;                 // [rows, outputs], contiguous: bf16, or float32 if `wide`
    bool wide, gated;

    int panel_outputs() const { return gated ? LINEAR_PANEL / 2 : LINEAR_PANEL; }
    std::int64_t pairs() const { return (inputs + 1) / 2; }
    std::int64_t panels() const { return (outputs + panel_outputs() - 1) / panel_outputs(); }
    // From a panel to the next.
    std::int64_t panel_bytes() const { return panel_pairs * LINEAR_PANEL * 4; }
};

// The outputs of one panel for some rows.
struct LinearTask {
    std::int64_t panel, first_row, rows;
};

using LinearKernel = void (*)(const Linear&, const LinearTask&);

// All outputs, on at most `threads` threads.
void multiply(const Linear& call, LinearKernel kernel, int threads);

// Rows of a weight that is not gated: out[i] = weight[numbers[i] - first], zeros where there is no such
// row.
struct WeightRows {
    const void* weight;
    std::int64_t outputs, inputs;
    const std::int64_t* numbers;
    std::int64_t count, first;
    void* out;  // [count, inputs] bf16
};

void take_rows(const WeightRows& call, int threads);

}  // namespace kvspan
