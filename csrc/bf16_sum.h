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

// out[lane] = out[lane] * fade[lane] + the sum over a tile's keys of weight times value.
struct WeightedSum {
    int dim, keys;
    const std::int32_t* weights;  // [lanes, TILE_KEYS / 2]: those of neighbouring keys, each pair a word
    const float* fade;
    float* out;  // [lanes, padded(dim)]
};

// N lanes times V vectors of dims. `pairs_at(d, key, to)` fills `to` with dims of two keys, each two that
// belong together side by side.
template <int N, int V, class T, class PairsAt>
KVSPAN_APART void add(const WeightedSum& sum, int lane, Ahead<T>& ahead, const PairsAt& pairs_at) {
    const int width = padded(sum.dim);
    const std::int32_t* weights = sum.weights + lane * (TILE_KEYS / 2);
    Ahead<T> asking = ahead;
    for (int d = 0; d < sum.dim; d += 16 * V) {
        float* out = sum.out + static_cast<std::int64_t>(lane) * width + d;
        __m512 sums[N][V];
        for (int n = 0; n < N; ++n) {
            const __m512 factor = _mm512_set1_ps(sum.fade[lane + n]);
            for (int i = 0; i < V; ++i)
                sums[n][i] = _mm512_mul_ps(_mm512_load_ps(out + n * width + 16 * i), factor);
        }
        for (int key = 0; key < sum.keys; key += 2) {
            __m512i pairs[V];
            pairs_at(d, key, pairs);
            asking.ask(1);
            for (int n = 0; n < N; ++n) {
                const __m512i weight = _mm512_set1_epi32(weights[n * (TILE_KEYS / 2) + key / 2]);
                for (int i = 0; i < V; ++i) sums[n][i] = dot(sums[n][i], weight, pairs[i]);
            }
        }
        for (int n = 0; n < N; ++n) {
            for (int i = 0; i < V; ++i) _mm512_store_ps(out + n * width + 16 * i, sums[n][i]);
        }
    }
    ahead = asking;
}

// Lanes from `lane` on, at most MOST of them at a time.
template <int MOST = SUMMED_LANES, class T, class PairsAt>
void add_all(const WeightedSum& sum, int lane, int lanes, Ahead<T>& ahead, const PairsAt& pairs_at) {
    for (; lane + MOST <= lanes; lane += MOST) add<MOST, 4>(sum, lane, ahead, pairs_at);
    switch (lanes - lane) {
        case 5:
            if constexpr (MOST > 5) add<5, 4>(sum, lane, ahead, pairs_at);
            return;
        case 4:
            return add<4, 4>(sum, lane, ahead, pairs_at);
        case 3:
            return add<3, 4>(sum, lane, ahead, pairs_at);
        case 2:
            return add<2, 4>(sum, lane, ahead, pairs_at);
        case 1:
            return add<1, 4>(sum, lane, ahead, pairs_at);
        default:
            return;
    }
}

// The same in higher blocks, which pair the same values less often.
template <class T, class PairsAt>
void add_wide(const WeightedSum& sum, int lanes, Ahead<T>& ahead, const PairsAt& pairs_at) {
    int lane = 0;
    for (; lane + WIDE_BLOCK <= lanes; lane += WIDE_BLOCK) add<WIDE_BLOCK, 2>(sum, lane, ahead, pairs_at);
    add_all(sum, lane, lanes, ahead, pairs_at);
}

}  // namespace
}  // namespace kvspan
