// Attention of bf16 queries over int8: scores as `Bf16Dot` makes them, exact up to float32, and values by
// AVX-512's dot products of bytes, which sum in int32 and take codes as they are. For files compiled for
// AVX-512-VNNI, BF16 and VBMI alone.
//
// A tile's weights become whole numbers, of which the largest of a lane is 65535, and those two terms of 8
// bits; sums over the high terms, times 256, and over the low ones are exact together. So a weight is within
// 2^-17 of its lane's largest in the tile, where a bf16 would be within 2^-9 of itself.
//
// Knows no scales below zero.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "bf16_dot.h"
#include "cells.h"
#include "flash.h"

namespace kvspan {
namespace {

// sum += a . b by fours, of a from 0 to 255 and b with a sign. Where it is asked for by its intrinsic, gcc 12
// copies the sums to and fro.
KVSPAN_INLINE void dot_bytes(__m512i& sum, __m512i a, __m512i b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

class Int8Dot : public Bf16Dot<CodeCells<I8>> {
public:
    static Vec weigh(const Tile<I8>& tile, const Scratch& scratch, int lane, float scale, float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        __m512 weights[4], total = _mm512_setzero_ps();
        __m512i most = _mm512_setzero_si512();  // as bits, of which those of NaN are the largest
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(scores + 16 * i), _mm512_set1_ps(scale),
                                             _mm512_set1_ps(max));
            const __m512 weight = exp2_of(x);
            total = _mm512_add_ps(total, weight);
            weights[i] = _mm512_mul_ps(weight, _mm512_load_ps(tile.value_scales + 16 * i));
            most = _mm512_max_epi32(most, (__m512i)weights[i]);
        }
        const float largest = __builtin_bit_cast(float, _mm512_reduce_max_epi32(most));
        float* to = scratch.weights + lane * TILE_KEYS;
        split(weights, 65535.0f / (largest > 1e-30f ? largest : 1e-30f), words(to));
        to[UNIT_AT] = largest / 65535.0f;
        return (Vec)total;
    }

    static void accumulate(const Attention& call, int lanes, const Tile<I8>& tile, Ahead<I8>& ahead,
                           const Scratch& scratch, const float* fade, float* out) {
        const int width = padded(call.value_dim);
        const std::int32_t* weights = words(scratch.weights);
        for (int d = 0; d < call.value_dim; d += CHUNK) {
            each_block(lanes, [&]<int N>(int lane) {
                float* to = out + static_cast<std::int64_t>(lane) * width + d;
                const Sum sum{d, call.value_dim - d, width, weights + lane * TILE_KEYS, fade + lane, to};
                if constexpr (N <= FEW_LANES) {
                    add<N, 4, 0>(tile, sum, ahead);
                } else {
                    add<N, 2, 0>(tile, sum, ahead);
                    add<N, 2, 1>(tile, sum, ahead);
                }
            });
        }
    }

    static void finish(const Attention& call, const Unit& unit, float* out) {
        const std::int64_t size = static_cast<std::int64_t>(unit.lanes()) * padded(call.value_dim);
        for (std::int64_t i = 0; i < size; i += CHUNK) CodeCells<E4m3>::restore(out + i);
    }

private:
    static constexpr int LANES = 6;      // of a block
    static constexpr int FEW_LANES = 3;  // whose sums over all vectors of a chunk fit in registers
    static constexpr int CHUNK = 64;     // dims of a vector of codes
    static constexpr int LOWS = 16;      // words of weights before their low terms,
    static constexpr int UNIT_AT = 32;   // and before what both are multiplied by

    static std::int32_t* words(float* scratch) { return reinterpret_cast<std::int32_t*>(scratch); }

    static __mmask64 first(int left) { return left >= CHUNK ? ~0ull : (1ull << left) - 1; }

    // The lowest bytes of 32 words, then their second ones.
    struct Bytes64 {
        alignas(64) std::uint8_t at[64] = {};

        constexpr Bytes64() {
            for (int i = 0; i < 64; ++i) at[i] = static_cast<std::uint8_t>(i % 32 * 4 + i / 32);
        }
    };

    // Weights over their largest, times 65535, in two terms.
    static KVSPAN_INLINE void split(const __m512 (&weights)[4], float inverse, std::int32_t* to) {
        static constexpr Bytes64 LOWS_THEN_HIGHS;
        const __m512i order = _mm512_load_si512(LOWS_THEN_HIGHS.at);
        __m512i whole[4], terms[2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(weights[i], _mm512_set1_ps(inverse)));
        for (int i = 0; i < 2; ++i)
            terms[i] = _mm512_permutex2var_epi8(whole[2 * i], order, whole[2 * i + 1]);
        _mm512_store_si512(to, _mm512_shuffle_i64x2(terms[0], terms[1], 0xee));
        _mm512_store_si512(to + LOWS, _mm512_shuffle_i64x2(terms[0], terms[1], 0x44));
    }

    // Calls `run<N>(lane)` for blocks of about as many lanes each.
    template <class Run>
    static void each_block(int lanes, const Run& run) {
        for (int lane = 0, taken; lane < lanes; lane += taken) {
            const int left = lanes - lane, blocks = (left + LANES - 1) / LANES;
            taken = (left + blocks - 1) / blocks;
            switch (taken) {
                case 1:
                    run.template operator()<1>(lane);
                    break;
                case 2:
                    run.template operator()<2>(lane);
                    break;
                case 3:
                    run.template operator()<3>(lane);
                    break;
                case 4:
                    run.template operator()<4>(lane);
                    break;
                case 5:
                    run.template operator()<5>(lane);
                    break;
                default:
                    run.template operator()<LANES>(lane);
            }
        }
    }

    static KVSPAN_INLINE __m512i joined(__m512i high, __m512i low) {
        return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    }

    // Of some lanes, over a chunk's dims, of which the first is `d` and `left` there are.
    struct Sum {
        int d, left, width;
        const std::int32_t* weights;
        const float* fade;
        float* out;
    };

    // N lanes' sums over V vectors of a chunk's dims: all, or those of one HALF of each 16. Four keys of a dim
    // lie side by side, dims in the order that `restore` undoes.
    template <int N, int V, int HALF>
    KVSPAN_APART static void add(const Tile<I8>& tile, const Sum& sum, Ahead<I8>& ahead) {
        const int keys = tile.count, d = sum.d;
        const __mmask64 there = first(sum.left);
        Ahead<I8> asking = ahead;
        __m512i high[N][V], low[N][V];
#pragma GCC unroll 12
        for (int i = 0; i < V * N; ++i) high[i / V][i % V] = low[i / V][i % V] = _mm512_setzero_si512();
        const std::int32_t* word = sum.weights;
        for (int key = 0; key < keys; key += 4, ++word) {
            asking.ask(V - 1);  // at a pace that few lanes' steps last for
            __m512i vectors[V];
            fours<V, HALF>(tile.values + key, d, there, vectors);
#pragma GCC unroll 6
            for (int n = 0; n < N; ++n) {
                const __m512i h = _mm512_set1_epi32(word[n * TILE_KEYS]);
                const __m512i l = _mm512_set1_epi32(word[n * TILE_KEYS + LOWS]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    dot_bytes(high[n][v], h, vectors[v]);
                    dot_bytes(low[n][v], l, vectors[v]);
                }
            }
        }
        ahead = asking;
#pragma GCC unroll 6
        for (int n = 0; n < N; ++n) {
            const auto* unit_at = reinterpret_cast<const float*>(sum.weights + n * TILE_KEYS + UNIT_AT);
            const __m512 unit = _mm512_set1_ps(*unit_at), factor = _mm512_set1_ps(sum.fade[n]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                float* at = sum.out + n * sum.width + 32 * HALF + 16 * v;
                const __m512 whole = _mm512_cvtepi32_ps(joined(high[n][v], low[n][v]));
                const __m512 faded = _mm512_mul_ps(_mm512_load_ps(at), factor);
                _mm512_store_ps(at, _mm512_fmadd_ps(whole, unit, faded));
            }
        }
    }

    template <int V, int HALF>
    static KVSPAN_INLINE void fours(const I8* const* rows, int d, __mmask64 there, __m512i (&to)[V]) {
        __m512i r[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) r[k] = _mm512_maskz_loadu_epi8(there, rows[k] + d);
        if constexpr (HALF == 0) {
            const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpacklo_epi8(r[2], r[3]);
            to[0] = _mm512_unpacklo_epi16(a, b);
            to[1] = _mm512_unpackhi_epi16(a, b);
        }
        if constexpr (HALF == 1 || V == 4) {
            const __m512i a = _mm512_unpackhi_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[2], r[3]);
            to[V - 2] = _mm512_unpacklo_epi16(a, b);
            to[V - 1] = _mm512_unpackhi_epi16(a, b);
        }
    }
};

}  // namespace
}  // namespace kvspan
