// Sums of values times weights, in register blocks of lanes times dims, by dot products of pairs of keys. For
// files compiled for AVX-512-BF16 alone.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "flash.h"

namespace kvspan {
namespace {

constexpr int SUMMED_LANES = 6;  // of a register block, with 4 vectors each
constexpr int WIDE_BLOCK = 8;    // likewise, with 2

enum class Asks { nothing, rows, soon };  // what is asked for meanwhile

// out[lane] = out[lane] * fade[lane] + the sum over a tile's keys of weight times value.
struct WeightedSum {
    int dim, keys;
    const std::int32_t* weights;  // [lanes, TILE_KEYS / 2]: those of neighbouring keys, each pair a word
    const float* fade;
    float* out;  // [lanes, padded(dim)]
};

// N lanes times V vectors of dims, from `lane` and `d` on, of all keys. `pairs_at(d)` gives what fills `to`
// with those dims of two keys, by `(key, to)`, each two that belong together side by side.
//
// Between two blocks the multiplier idles, so little is done there: addresses that a compiler would keep over
// the loop, in registers of vectors for want of others, are made again.
template <int N, int V, Asks ASKS, class T, class PairsAt>
KVSPAN_INLINE void add_block(const WeightedSum& sum, int lane, int d, Ahead<T>& ahead,
                             const PairsAt& pairs_at) {
    std::int64_t width = padded(sum.dim);
    float* const out = sum.out + lane * width + d;
    const float* fade = sum.fade + lane;
    asm volatile("" : "+r"(fade));
    __m512 sums[N][V];
    for (int n = 0; n < N; ++n) {
        const __m512 factor = _mm512_set1_ps(fade[n]);
        for (int i = 0; i < V; ++i)
            sums[n][i] = _mm512_mul_ps(_mm512_load_ps(out + n * width + 16 * i), factor);
    }
    const std::int32_t* weights = sum.weights + lane * (TILE_KEYS / 2);
    const auto pairs_of = pairs_at(d);
    const int keys = sum.keys;
    for (int key = 0; key < keys; key += 2, ++weights) {
        __m512i pairs[V];
        pairs_of(key, pairs);
        if constexpr (ASKS == Asks::rows) ahead.ask(1);
        if constexpr (ASKS == Asks::soon) ahead.ask_soon_line();
        for (int n = 0; n < N; ++n) {
            const __m512i weight = _mm512_set1_epi32(weights[n * (TILE_KEYS / 2)]);
            for (int i = 0; i < V; ++i) sums[n][i] = dot(sums[n][i], weight, pairs[i]);
        }
    }
    asm volatile("" : "+r"(width));
    for (int n = 0; n < N; ++n) {
        for (int i = 0; i < V; ++i) _mm512_store_ps(out + n * width + 16 * i, sums[n][i]);
    }
}

// All dims of N lanes.
template <int N, int V, Asks ASKS, class T, class PairsAt>
KVSPAN_APART void add(const WeightedSum& sum, int lane, Ahead<T>& ahead, const PairsAt& pairs_at) {
    Ahead<T> asking = ahead;
    for (int d = 0; d < sum.dim; d += 16 * V) add_block<N, V, ASKS>(sum, lane, d, asking, pairs_at);
    ahead = asking;
}

// Lanes from `lane` on, at most MOST of them at a time.
template <int MOST = SUMMED_LANES, class T, class PairsAt>
void add_all(const WeightedSum& sum, int lane, int lanes, Ahead<T>& ahead, const PairsAt& pairs_at) {
    for (; lane + MOST <= lanes; lane += MOST) add<MOST, 4, Asks::rows>(sum, lane, ahead, pairs_at);
    switch (lanes - lane) {
        case 5:
            if constexpr (MOST > 5) add<5, 4, Asks::rows>(sum, lane, ahead, pairs_at);
            return;
        case 4:
            return add<4, 4, Asks::rows>(sum, lane, ahead, pairs_at);
        case 3:
            return add<3, 4, Asks::rows>(sum, lane, ahead, pairs_at);
        case 2:
            return add<2, 4, Asks::rows>(sum, lane, ahead, pairs_at);
        case 1:
            return add<1, 4, Asks::rows>(sum, lane, ahead, pairs_at);
        default:
            return;
    }
}

// The same in higher blocks, which pair the same values less often.
template <class T, class PairsAt>
void add_wide(const WeightedSum& sum, int lanes, Ahead<T>& ahead, const PairsAt& pairs_at) {
    int lane = 0;
    for (; lane + WIDE_BLOCK <= lanes; lane += WIDE_BLOCK) {
        const auto block = ahead.left() > 0         ? add<WIDE_BLOCK, 2, Asks::rows, T, PairsAt>
                           : ahead.soon_lines() > 0 ? add<WIDE_BLOCK, 2, Asks::soon, T, PairsAt>
                                                    : add<WIDE_BLOCK, 2, Asks::nothing, T, PairsAt>;
        block(sum, lane, ahead, pairs_at);
    }
    if (lanes - lane == WIDE_BLOCK - 1)
        return add<WIDE_BLOCK - 1, 2, Asks::rows>(sum, lane, ahead, pairs_at);
    add_all(sum, lane, lanes, ahead, pairs_at);
}

}  // namespace
}  // namespace kvspan
