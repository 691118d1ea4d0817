// A panel of a linear layer's outputs by bf16 dot products: 16 sums at a time, of 1 to 4 rows.
#pragma once

#include "bf16.h"
#include "linear.h"

namespace kvspan {
namespace {

struct Bf16Linear {
    static void panel(const Linear& call, std::int64_t first, int count) {
        const Bf16* weights[LINEAR_PANEL];
        for (int n = 0; n < LINEAR_PANEL; ++n) {
            const std::int64_t output = first + (n < count ? n : 0);  // what is too much is not stored
            weights[n] = static_cast<const Bf16*>(call.weight) + output * call.weight_stride;
        }
        std::int64_t row = 0;
        for (; row + 4 <= call.rows; row += 4) rows<4, 4>(call, weights, row, first, count);
        switch (call.rows - row) {
            case 3:
                return rows<3, 4>(call, weights, row, first, count);
            case 2:
                return rows<2, 8>(call, weights, row, first, count);
            case 1:
                return rows<1, 16>(call, weights, row, first, count);
            default:
                return;
        }
    }

private:
    template <int R, int N>
    static void rows(const Linear& call, const Bf16* const* weights, std::int64_t row,
                     std::int64_t first, int count) {
        const Bf16* input = static_cast<const Bf16*>(call.input) + row * call.input_stride;
        const std::int64_t ahead = row == 0 ? LINEAR_PANEL * call.weight_stride : 0;
        for (int at = 0; at < count; at += N) {
            __m512 sums[16];
            for (auto& sum : sums) sum = _mm512_setzero_ps();
            std::int64_t k = 0;
            for (; k + 32 <= call.inputs; k += 32)
                step<R, N>(call, input, weights + at, k, 32, ahead, sums);
            if (k < call.inputs) {
                step<R, N>(call, input, weights + at, k, static_cast<int>(call.inputs - k), ahead, sums);
            }
            alignas(64) float results[16];
            _mm512_store_ps(results, reduce(sums));
            for (int r = 0; r < R; ++r) {
                for (int n = 0; n < N && at + n < count; ++n) {
                    put(call, row + r, first + at + n, results[r * N + n]);
                }
            }
        }
    }

    template <int R, int N>
    static inline void step(const Linear& call, const Bf16* input, const Bf16* const* weights,
                            std::int64_t k, int left, std::int64_t ahead, __m512 (&sums)[16]) {
        __m512i w[N];
        for (int n = 0; n < N; ++n) {
            w[n] = dims(weights[n] + k, left);
            if (ahead) fetch(weights[n] + k + ahead);
        }
        for (int r = 0; r < R; ++r) {
            const __m512i x = dims(input + r * call.input_stride + k, left);
            for (int n = 0; n < N; ++n) sums[r * N + n] = dot(sums[r * N + n], x, w[n]);
        }
    }

    static void put(const Linear& call, std::int64_t row, std::int64_t output, float result) {
        if (call.bias) {
            const std::uint32_t bits = std::uint32_t{static_cast<const Bf16*>(call.bias)[output].bits}
                                       << 16;
            float bias;
            __builtin_memcpy(&bias, &bits, sizeof bias);
            result += bias;
        }
        const std::int64_t at = row * call.outputs + output;
        if (call.wide) {
            static_cast<float*>(call.out)[at] = result;
            return;
        }
        const __m128bh narrow = _mm_cvtneps_pbh(_mm_set_ss(result));
        __builtin_memcpy(static_cast<Bf16*>(call.out) + at, &narrow, sizeof(Bf16));
    }
};

}  // namespace
}  // namespace kvspan
