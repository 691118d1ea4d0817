// What happens to a row between two linear layers, in one pass over it each: memory and calls are saved,
// not arithmetic. Results are rounded where a chain of torch operators would round them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace kvspan {

// x += more, if there is more; out = weight * round(x / sqrt(mean(x^2) + eps)); [rows, heads, size],
// strides in elements, `more` and `out` contiguous.
struct RmsNorm {
    void* x;
    std::int64_t rows, row_stride, head_stride;
    int heads;
    const void* more;  // or null: then x is only read
    int size;
    const void* weight;
    float eps;
    void* out;
};

// out = round(silu(gate)) * up, of rows that hold gate and up side by side: [rows, 2 * size] -> [rows,
// size].
struct SiluMul {
    const void* gate_up;
    std::int64_t rows, stride;
    int size;
    void* out;
};

// Rotates pairs of each head's last `dim` elements by the row's angles, and copies those before them:
// [rows, heads, plain + dim], `out` contiguous. Pairs are (i, i + dim / 2) of what is left, and of `x`
// too if they are not interleaved there, (2i, 2i + 1).
struct Rotate {
    const void* x;
    std::int64_t rows, row_stride, head_stride;
    int heads, plain, dim;
    bool interleaved;
    const float *cos, *sin;  // [rows, dim / 2]
    void* out;
};

// Rows of several tensors, one behind the other: out = [rows, sum of sizes], in bytes.
struct SideBySide {
    struct Part {
        const std::byte* from;
        std::int64_t size, stride;  // of a row
    };
    std::vector<Part> parts;
    std::int64_t rows;
    std::byte* out;

    std::int64_t row_size() const;
};

struct RowKernels {
    void (*rms_norm)(const RmsNorm&, std::int64_t row);
    void (*silu_mul)(const SiluMul&, std::int64_t row);
    void (*rotate)(const Rotate&, std::int64_t row);
};

// Calls `kernel(call, row)` for all rows, on at most `threads` threads.
void run_rows(const RmsNorm& call, const RowKernels& kernels, int threads);
void run_rows(const SiluMul& call, const RowKernels& kernels, int threads);
void run_rows(const Rotate& call, const RowKernels& kernels, int threads);
void run_rows(const SideBySide& call, int threads);

}  // namespace kvspan
