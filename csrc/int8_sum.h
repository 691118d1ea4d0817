// Sums of int8 values times weights by AVX-512's dot products of bytes, which sum in int32 and take
// codes as they are. For files compiled for AVX-512-VNNI and VBMI alone.
//
// A tile's weights become whole numbers up to 65535, and those two terms of 8 bits; sums over the high
// terms, times 256, and over the low ones are exact together.
#pragma once

#include <cstdint>

#include "flash.h"

namespace kvspan {
namespace {

// sum += a . b by fours, of a from 0 to 255 and b with a sign. Where it is asked for by its intrinsic,
// gcc 12 copies the sums to and fro.
KVSPAN_INLINE void dot_bytes(__m512i& sum, __m512i a, __m512i b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// The same, of four b that are repeated for all.
KVSPAN_INLINE void dot_bytes(__m512i& sum, __m512i a, const std::int32_t* b) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));
}

// A lane's weights in a tile: words of four keys' low terms, then of high ones, then what whole numbers
// are multiplied by.
struct ByteWeights {
    static constexpr int LOWS = 16, UNIT_AT = 32;

    // The lowest bytes of 32 words, then their second ones.
    struct Bytes64 {
        alignas(64) std::uint8_t at[64] = {};

        constexpr Bytes64() {
            for (int i = 0; i < 64; ++i) at[i] = static_cast<std::uint8_t>(i % 32 * 4 + i / 32);
        }
    };

    // Weights over their largest, times 65535, in two terms: each is within 2^-17 of that largest.
    static KVSPAN_INLINE void put(const __m512 (&weights)[4], float factor, float* to) {
        __m512i most = _mm512_setzero_si512();  // as bits, of which those of NaN are the largest
        for (int i = 0; i < 4; ++i) most = _mm512_max_epi32(most, (__m512i)weights[i]);
        const float largest = __builtin_bit_cast(float, _mm512_reduce_max_epi32(most));
        pack(weights, _mm512_set1_ps(65535.0f / (largest > 1e-30f ? largest : 1e-30f)), to);
        to[UNIT_AT] = factor * largest / 65535.0f;
    }

    // The words of weights times `inverse`.
    static KVSPAN_INLINE void pack(const __m512 (&weights)[4], __m512 inverse, float* to) {
        static constexpr Bytes64 LOWS_THEN_HIGHS;
        __m512i whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(weights[i], inverse));
        const __m512i order = _mm512_load_si512(LOWS_THEN_HIGHS.at);
        __m512i terms[2];
        for (int i = 0; i < 2; ++i)
            terms[i] = _mm512_permutex2var_epi8(whole[2 * i], order, whole[2 * i + 1]);
        _mm512_store_si512(to, _mm512_shuffle_i64x2(terms[0], terms[1], 0xee));
        _mm512_store_si512(to + LOWS, _mm512_shuffle_i64x2(terms[0], terms[1], 0x44));
    }
};

class ByteSum {
public:
    static constexpr int CHUNK = 64;  // dims of a vector of codes

    // out[lane] = out[lane] * fade[lane] + the sum over a tile's keys of weight times value, of `lanes`
    // lanes from `first` on.
    static void run(const Attention& call, int first, int lanes, const Tile<I8>& tile, Ahead<I8>& ahead,
                    const Scratch& scratch, const float* fade, float* out) {
        const int width = padded(call.value_dim);
        const std::int32_t* weights = words(scratch.weights);
        for (int d = 0; d < call.value_dim; d += CHUNK) {
            each_block(lanes, [&]<int N>(int at) {
                const int lane = first + at;
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

    static __mmask64 there(int left) { return left >= CHUNK ? ~0ull : (1ull << left) - 1; }

private:
    static constexpr int LANES = 6;      // of a block
    static constexpr int FEW_LANES = 3;  // whose sums over all vectors of a chunk fit in registers

    static std::int32_t* words(float* scratch) { return reinterpret_cast<std::int32_t*>(scratch); }

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

    // N lanes' sums over V vectors of a chunk's dims: all, or those of one HALF of each 16. Four keys of
    // a dim lie side by side, dims in the order that `restore` undoes.
    template <int N, int V, int HALF>
    KVSPAN_APART static void add(const Tile<I8>& tile, const Sum& sum, Ahead<I8>& ahead) {
        const int keys = tile.count, d = sum.d;
        const __mmask64 mask = there(sum.left);
        Ahead<I8> asking = ahead;
        __m512i high[N][V], low[N][V];
#pragma GCC unroll 12
        for (int i = 0; i < V * N; ++i) high[i / V][i % V] = low[i / V][i % V] = _mm512_setzero_si512();
        const std::int32_t* word = sum.weights;
        for (int key = 0; key < keys; key += 4, ++word) {
            asking.ask(V - 1);  // at a pace that few lanes' steps last for
            __m512i vectors[V];
            fours<V, HALF>(tile.values + key, d, mask, vectors);
#pragma GCC unroll 6
            for (int n = 0; n < N; ++n) {
                const __m512i h = _mm512_set1_epi32(word[n * TILE_KEYS]);
                const __m512i l = _mm512_set1_epi32(word[n * TILE_KEYS + ByteWeights::LOWS]);
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
            const auto* weights = reinterpret_cast<const float*>(sum.weights + n * TILE_KEYS);
            const __m512 unit = _mm512_set1_ps(weights[ByteWeights::UNIT_AT]);
            const __m512 factor = _mm512_set1_ps(sum.fade[n]);
            const bool steady = sum.fade[n] == 1.0f;
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                float* at = sum.out + n * sum.width + 32 * HALF + 16 * v;
                const __m512 whole = _mm512_cvtepi32_ps(joined(high[n][v], low[n][v]));
                __m512 before = _mm512_load_ps(at);
                if (!steady) before = _mm512_mul_ps(before, factor);
                _mm512_store_ps(at, _mm512_fmadd_ps(whole, unit, before));
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
