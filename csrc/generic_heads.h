// The kernels of `heads.h` on vectors of any width. A sum is made in the same order whatever rows share
// the task.
#pragma once

#include "attention.h"
#include "heads.h"
#include "vectors.h"

namespace kvspan {
namespace {

// Rows of a matrix that come behind those at hand, asked for line by line, front to back: memory brings
// a core three times as much of one stream as of several rows side by side, which is how they are then
// read.
template <class T>
class RowsAhead {
public:
    RowsAhead(const T* rows, std::int64_t stride, int count, int size)
        : row_(rows), stride_(stride), left_(count), size_(size) {}

    // A line for each line's worth of vectors at hand, of which this is the `vector`-th.
    void ask_beside(int vector) {
        if (vector % (LINE > WIDTH ? LINE / WIDTH : 1) == 0) ask_line();
    }

    void ask_all() {
        while (left_ > 0) ask_line();
    }

private:
    static constexpr int LINE = 64 / static_cast<int>(sizeof(T));

    void ask_line() {
        if (left_ <= 0) return;
        __builtin_prefetch(row_ + at_);
        at_ += LINE;
        if (at_ < size_) return;
        at_ = 0;
        row_ += stride_;
        --left_;
    }

    const T* row_;
    std::int64_t stride_;
    int left_, size_, at_ = 0;
};

template <class T>
class GenericHeads {
public:
    static void sums(const HeadProduct& call, const HeadTask& task) {
        alignas(64) float sums[HEAD_ROWS * SUMMED_PIECE] = {};
        const T* const x = input(call, task);
        const T* const weight = matrix(call, task) + task.first;
        const auto ahead_from = [&](int input) {
            const int left = call.inputs - input;
            return RowsAhead<T>(weight + input * call.weight_row_stride, call.weight_row_stride,
                                left < PASS ? left : PASS, task.outputs);
        };
        ahead_from(0).ask_all();
        for (int input = 0; input < call.inputs; input += PASS) {
            const T* const rows = weight + input * call.weight_row_stride;
            RowsAhead<T> ahead = ahead_from(input + PASS);
            in_blocks(task.rows, [&]<int N>(int row) {
                add<N>(call, x + row * call.row_stride + input, call.inputs - input, rows, ahead,
                       task.outputs, sums + row * SUMMED_PIECE);
            });
        }
        for (int row = 0; row < task.rows; ++row) {
            for (int i = 0; i < task.outputs; i += WIDTH) {
                const Vec sum = load(sums + row * SUMMED_PIECE + i);
                store_up_to(output(call, task, row) + i, sum, task.outputs - i);
            }
        }
    }

    static void dots(const HeadProduct& call, const HeadTask& task) {
        const T* const x = input(call, task);
        const T* const weight = matrix(call, task) + task.first * call.weight_row_stride;
        const auto ahead_from = [&](int output) {
            const int left = task.outputs - output;
            return RowsAhead<T>(weight + output * call.weight_row_stride, call.weight_row_stride,
                                left < OUTPUTS ? left : OUTPUTS, call.inputs);
        };
        ahead_from(0).ask_all();
        for (int i = 0; i < task.outputs;) {
            const T* const rows = weight + i * call.weight_row_stride;
            const bool several = task.outputs - i >= OUTPUTS;
            RowsAhead<T> ahead = ahead_from(i + OUTPUTS);
            in_blocks(task.rows, [&]<int N>(int row) {
                const T* const of_rows = x + row * call.row_stride;
                T* const out = output(call, task, row) + i;
                several ? dot<N, OUTPUTS>(call, of_rows, rows, ahead, out)
                        : dot<N, 1>(call, of_rows, rows, ahead, out);
            });
            i += several ? OUTPUTS : 1;
        }
    }

private:
    static constexpr int BLOCK = WIDTH == 16 ? 4 : 2;   // rows whose sums are in registers
    static constexpr int OUTPUTS = 4;                   // likewise, of each
    static constexpr int PASS = WIDTH < 8 ? WIDTH : 8;  // rows of the matrix: 8 KiB, and as many ahead

    static const T* input(const HeadProduct& call, const HeadTask& task) {
        return static_cast<const T*>(call.x) + task.row * call.row_stride + task.head * call.head_stride;
    }

    static const T* matrix(const HeadProduct& call, const HeadTask& task) {
        return static_cast<const T*>(call.weight) + task.head * call.weight_head_stride;
    }

    static T* output(const HeadProduct& call, const HeadTask& task, int row) {
        const std::int64_t head = (task.row + row) * call.heads + task.head;
        return static_cast<T*>(call.out) + head * call.outputs + task.first;
    }

    // Calls `body<N>(row)` for all rows, N of them at a time, as many as may be.
    template <class Body>
    static void in_blocks(int rows, const Body& body) {
        int row = 0;
        for (; row + BLOCK <= rows; row += BLOCK) body.template operator()<BLOCK>(row);
        for (; row + 2 <= rows; row += 2) body.template operator()<2>(row);
        for (; row < rows; ++row) body.template operator()<1>(row);
    }

    // Adds up to PASS rows of the matrix, times inputs of N rows, to their sums.
    template <int N>
    static void add(const HeadProduct& call, const T* x, int inputs, const T* rows, RowsAhead<T>& ahead,
                    int outputs, float* sums) {
        const int depth = inputs < PASS ? inputs : PASS;
        float factors[N][WIDTH];
        for (int n = 0; n < N; ++n) store(factors[n], load_up_to(x + n * call.row_stride, depth));
        const auto add_vector = [&](int i, const auto& load_row) {
            Vec sum[N];
            for (int n = 0; n < N; ++n) sum[n] = load(sums + n * SUMMED_PIECE + i);
            for (int k = 0; k < depth; ++k) {
                ahead.ask_beside(k);
                const Vec v = load_row(rows + k * call.weight_row_stride + i);
                for (int n = 0; n < N; ++n) sum[n] += v * factors[n][k];
            }
            for (int n = 0; n < N; ++n) store(sums + n * SUMMED_PIECE + i, sum[n]);
        };
        const int whole = outputs - outputs % WIDTH;
        for (int i = 0; i < whole; i += WIDTH) add_vector(i, [](const T* p) { return load(p); });
        if (whole < outputs) {
            add_vector(whole, [&](const T* p) { return load_some(p, outputs - whole); });
        }
    }

    // Dot products of N rows with D rows of the matrix.
    template <int N, int D>
    static void dot(const HeadProduct& call, const T* x, const T* rows, RowsAhead<T>& ahead, T* out) {
        Vec sums[N][D] = {};
        const auto add_vector = [&](int i, const auto& load_part) {
            Vec v[D];
            for (int d = 0; d < D; ++d) {
                ahead.ask_beside(d);
                v[d] = load_part(rows + d * call.weight_row_stride + i);
            }
            for (int n = 0; n < N; ++n) {
                const Vec of_row = load_part(x + n * call.row_stride + i);
                for (int d = 0; d < D; ++d) sums[n][d] += of_row * v[d];
            }
        };
        const int whole = call.inputs - call.inputs % WIDTH;
        for (int i = 0; i < whole; i += WIDTH) add_vector(i, [](const T* p) { return load(p); });
        if (whole < call.inputs) {
            add_vector(whole, [&](const T* p) { return load_some(p, call.inputs - whole); });
        }
        const std::int64_t row_size = std::int64_t{call.heads} * call.outputs;
        for (int n = 0; n < N; ++n) {
            for (int d = 0; d < D; ++d) store_up_to(out + n * row_size + d, splat(sum(sums[n][d])), 1);
        }
    }
};

template <class T>
constexpr HeadKernels HEAD_KERNELS{GenericHeads<T>::sums, GenericHeads<T>::dots};

inline const HeadKernels& generic_heads(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16:
            return HEAD_KERNELS<Bf16>;
        case Dtype::f16:
            return HEAD_KERNELS<F16>;
        default:
            return HEAD_KERNELS<float>;
    }
}

}  // namespace
}  // namespace kvspan
