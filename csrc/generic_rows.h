// The kernels of `rows.h` on vectors of any width.
#pragma once

#include "rows.h"
#include "vectors.h"

namespace kvspan {
namespace {

template <class T>
struct GenericRows {
    static void rms_norm(const RmsNorm& call, std::int64_t row) {
        for (int head = 0; head < call.heads; ++head) norm_head(call, row, head);
    }

    static void norm_head(const RmsNorm& call, std::int64_t row, int head) {
        const std::int64_t at = (row * call.heads + head) * call.size;
        T* x = static_cast<T*>(call.x) + row * call.row_stride + head * call.head_stride;
        const T* more = call.more ? static_cast<const T*>(call.more) + at : nullptr;
        const T* weight = static_cast<const T*>(call.weight);
        T* out = static_cast<T*>(call.out) + at;
        Vec squares{};
        for (int i = 0; i < call.size; i += WIDTH) {
            Vec v = load_up_to(x + i, call.size - i);
            if (more) {
                v = rounded<T>(v + load_up_to(more + i, call.size - i));
                store_up_to(x + i, v, call.size - i);
            }
            squares += v * v;
        }
        const float mean = sum(squares) / static_cast<float>(call.size);
        const float scale = 1.0f / __builtin_sqrtf(mean + call.eps);
        for (int i = 0; i < call.size; i += WIDTH) {
            const Vec v = rounded<T>(load_up_to(x + i, call.size - i) * scale);
            store_up_to(out + i, v * load_up_to(weight + i, call.size - i), call.size - i);
        }
    }

    static void silu_mul(const SiluMul& call, std::int64_t row) {
        const T* gate = static_cast<const T*>(call.gate_up) + row * call.stride;
        const T* up = gate + call.size;
        T* out = static_cast<T*>(call.out) + row * call.size;
        for (int i = 0; i < call.size; i += WIDTH) {
            const Vec x = load_up_to(gate + i, call.size - i);
            store_up_to(out + i, rounded<T>(silu(x)) * load_up_to(up + i, call.size - i), call.size - i);
        }
    }

    static void rotate(const Rotate& call, std::int64_t row) {
        const int half = call.dim / 2;
        const float *cos = call.cos + row * half, *sin = call.sin + row * half;
        for (int head = 0; head < call.heads; ++head) {
            const T* x = static_cast<const T*>(call.x) + row * call.row_stride + head * call.head_stride;
            T* out = static_cast<T*>(call.out) + (row * call.heads + head) * (call.plain + call.dim);
            if (call.plain > 0) std::memcpy(out, x, call.plain * sizeof(T));
            x += call.plain, out += call.plain;
            for (int i = 0; i < half; i += WIDTH) {
                Vec a, b;
                if (call.interleaved) {
                    load_pairs(x + 2 * i, half - i, a, b);
                } else {
                    a = load_up_to(x + i, half - i), b = load_up_to(x + half + i, half - i);
                }
                const Vec c = load_up_to(cos + i, half - i), s = load_up_to(sin + i, half - i);
                store_up_to(out + i, a * c - b * s, half - i);
                store_up_to(out + half + i, b * c + a * s, half - i);
            }
        }
    }

    // Up to WIDTH pairs of neighbours: the first of each, and the second.
    static void load_pairs(const T* x, int count, Vec& first, Vec& second) {
        T firsts[WIDTH] = {}, seconds[WIDTH] = {};
        for (int i = 0; i < (count < WIDTH ? count : WIDTH); ++i) {
            firsts[i] = x[2 * i];
            seconds[i] = x[2 * i + 1];
        }
        first = load(firsts), second = load(seconds);
    }
};

template <class T>
constexpr RowKernels ROW_KERNELS{GenericRows<T>::rms_norm, GenericRows<T>::silu_mul,
                                 GenericRows<T>::rotate};

inline const RowKernels& generic_rows(Dtype dtype) {
    switch (dtype) {
        case Dtype::bf16:
            return ROW_KERNELS<Bf16>;
        case Dtype::f16:
            return ROW_KERNELS<F16>;
        default:
            return ROW_KERNELS<float>;
    }
}

}  // namespace
}  // namespace kvspan
