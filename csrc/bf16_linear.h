// A panel of a linear layer's outputs by dot products of bf16 pairs: up to 12 rows times 32 outputs in
// registers, so that a pair of vectors of weights serves 12 rows.
#pragma once

#include "bf16.h"
#include "linear.h"

namespace kvspan {
namespace {

struct Bf16Linear {
    static void panel(const Linear& call, const LinearTask& task) {
        const std::int64_t blocks = (task.rows + MOST_ROWS - 1) / MOST_ROWS;
        std::int64_t row = task.first_row;
        for (std::int64_t left = blocks, rows = task.rows; left > 0; --left) {
            const std::int64_t here = (rows + left - 1) / left;  // blocks as equal as they can be
            BLOCKS[here - 1](call, task.panel, row, row == task.first_row);
            row += here;
            rows -= here;
        }
    }

private:
    static constexpr int MOST_ROWS = 12;
    static constexpr int AHEAD = 2048;  // bytes: what memory needs to bring a line in time
    static constexpr int VECTORS = LINEAR_PANEL / 16;
    using Block = void (*)(const Linear&, std::int64_t panel, std::int64_t row, bool from_memory);

    // Three rows share a pointer, which leaves enough registers for all of them.
    template <int R>
    struct Rows {
        const Bf16* at[(R + 2) / 3];
        std::int64_t stride;

        Rows(const Linear& call, std::int64_t row) : stride(call.input_stride) {
            const Bf16* input = static_cast<const Bf16*>(call.input) + row * stride;
            for (int i = 0; i < (R + 2) / 3; ++i) at[i] = input + 3 * i * stride;
        }
        const Bf16* operator[](int r) const { return at[r / 3] + r % 3 * stride; }
    };

    template <int R>
    static void block(const Linear& call, std::int64_t panel, std::int64_t row, bool from_memory) {
        const std::int64_t pairs = call.inputs / 2;
        const auto* weight = static_cast<const std::int32_t*>(call.weight) +
                             panel * call.panel_pairs * LINEAR_PANEL;
        const Rows<R> input(call, row);
        __m512 sums[R][VECTORS];
        for (auto& of_row : sums) {
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
        }
        if (from_memory) {
            add<R, true>(input, weight, pairs, sums);
        } else {
            add<R, false>(input, weight, pairs, sums);
        }
        if (call.inputs % 2) {  // half a pair is left
            for (int r = 0; r < R; ++r) {
                const __m512i x = _mm512_set1_epi32(input[r][2 * pairs].bits);
                for (int v = 0; v < VECTORS; ++v) {
                    sums[r][v] = dot(sums[r][v], x, weights(weight + pairs * LINEAR_PANEL, v));
                }
            }
        }
        if (call.gated) return gate<R>(call, panel * 16, row, sums);
        for (int v = 0; v < VECTORS; ++v) {
            const std::int64_t first = panel * LINEAR_PANEL + 16 * v;
            if (first >= call.outputs) return;
            const __m512 more = bias(call, call.bias, first);
            for (int r = 0; r < R; ++r) put(call, row + r, first, _mm512_add_ps(sums[r][v], more));
        }
    }

    template <int R>
    static void gate(const Linear& call, std::int64_t first, std::int64_t row,
                     const __m512 (&sums)[R][VECTORS]) {
        const __m512 gate_bias = bias(call, call.bias, first);
        const __m512 up_bias = bias(call, call.up_bias, first);
        for (int r = 0; r < R; ++r) {
            const Vec gate = (Vec)_mm512_add_ps(sums[r][0], gate_bias);
            put(call, row + r, first,
                _mm512_mul_ps((__m512)silu(gate), _mm512_add_ps(sums[r][1], up_bias)));
        }
    }

    template <int R, bool FETCH>
    static inline __attribute__((always_inline)) void add(const Rows<R>& input,
                                                          const std::int32_t* weight, std::int64_t pairs,
                                                          __m512 (&sums)[R][VECTORS]) {
        for (std::int64_t pair = 0; pair < pairs; ++pair, weight += LINEAR_PANEL) {
            __m512i w[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                w[v] = weights(weight, v);
                if (FETCH) {
                    _mm_prefetch(reinterpret_cast<const char*>(weight + 16 * v) + AHEAD, _MM_HINT_T0);
                }
            }
            for (int r = 0; r < R; ++r) {
                std::int32_t both;
                __builtin_memcpy(&both, input[r] + 2 * pair, sizeof both);
                const __m512i x = _mm512_set1_epi32(both);
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], x, w[v]);
            }
        }
    }

    static inline __m512i weights(const std::int32_t* weight, int v) {
        return _mm512_loadu_si512(weight + 16 * v);
    }

    // Which of the 16 outputs from `first` on there are.
    static __mmask16 present(const Linear& call, std::int64_t first) {
        const std::int64_t left = call.outputs - first;
        return static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
    }

    static __m512 bias(const Linear& call, const void* some, std::int64_t first) {
        if (!some) return _mm512_setzero_ps();
        const Bf16* from = static_cast<const Bf16*>(some) + first;
        const __m256i halves = _mm256_maskz_loadu_epi16(present(call, first), from);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }

    static void put(const Linear& call, std::int64_t row, std::int64_t first, __m512 results) {
        const std::int64_t at = row * call.outputs + first;
        const __mmask16 which = present(call, first);
        if (call.wide) {
            return _mm512_mask_storeu_ps(static_cast<float*>(call.out) + at, which, results);
        }
        _mm256_mask_storeu_epi16(static_cast<Bf16*>(call.out) + at, which,
                                 (__m256i)_mm512_cvtneps_pbh(results));
    }

    static constexpr Block BLOCKS[MOST_ROWS] = {block<1>, block<2>, block<3>, block<4>,
                                                block<5>, block<6>, block<7>, block<8>,
                                                block<9>, block<10>, block<11>, block<12>};
};

}  // namespace
}  // namespace kvspan
