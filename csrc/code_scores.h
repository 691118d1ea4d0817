// Scores of few lanes over codes of 8 bits. A vector has 16 codes of each of four keys, as they lie in the
// cache, and sums have a quarter for each key: they are reduced by 6 shuffles for 16 scores, where a key a
// vector takes 31. For files compiled for AVX-512-BF16 and VBMI alone.
//
// Knows queries in plain order of dims, each 8 of them four times side by side, with zeros behind the last dim
// of a part: an instruction that repeats them would wait for those that exchange bytes.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "flash.h"

namespace kvspan {
namespace {

// Query vectors by quarters, `width` apart.
struct QuarteredQuery {
    const Bf16* data;
    int width;
};

// 32 dims of a query, each 8 of them four times.
inline void store_quarters(__m512i dims, Bf16* to) {
    _mm512_store_si512(to, _mm512_shuffle_i32x4(dims, dims, 0x00));
    _mm512_store_si512(to + 32, _mm512_shuffle_i32x4(dims, dims, 0x55));
    _mm512_store_si512(to + 64, _mm512_shuffle_i32x4(dims, dims, 0xaa));
    _mm512_store_si512(to + 96, _mm512_shuffle_i32x4(dims, dims, 0xff));
}

// Of four vectors: each quarter has the sums of their quarters there.
KVSPAN_INLINE __m512 sum_quarters(const __m512* v) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

template <class Cells>
class CodeScores {
public:
    using Element = typename Cells::Element;

    // Scores of `lanes` query vectors over a part's dims, into to[lanes][TILE_KEYS].
    static void run(int lanes, const Tile<Element>& tile, Ahead<Element>& ahead, const QuarteredQuery& query,
                    const Part& part, float* to) {
        using Block = void (*)(const Tile<Element>&, Ahead<Element>&, const QuarteredQuery&, const Part&,
                               float*);
        constexpr Block BLOCKS[] = {block<1, 4>, block<2, 4>, block<3, 4>, block<4, 4>,
                                    block<5, 2>, block<6, 2>, block<7, 2>, block<8, 2>};
        for (int lane = 0, taken; lane < lanes; lane += taken) {
            taken = lanes - lane < 8 ? lanes - lane : 8;
            const QuarteredQuery asked{query.data + lane * query.width, query.width};
            BLOCKS[taken - 1](tile, ahead, asked, part, to + lane * TILE_KEYS);
        }
    }

private:
    static constexpr int DIMS = 16;  // of a key in a vector

    // N lanes, and 4 * V keys at a time: vector v has keys v, v + V, v + 2 * V and v + 3 * V of them.
    template <int N, int V>
    KVSPAN_APART static void block(const Tile<Element>& tile, Ahead<Element>& ahead,
                                   const QuarteredQuery& query, const Part& part, float* to) {
        const Cells cells;
        const Bf16* const queries = query.data;
        const int width = query.width;
        Ahead<Element> asking = ahead;
        for (int key = 0; key < tile.count; key += 4 * V) {
            __m512 sums[(N * V + 3) / 4 * 4];
            for (auto& sum : sums) sum = _mm512_setzero_ps();
            const auto add = [&](int d, int left) __attribute__((always_inline)) {
                asking.ask(V);  // of 64 dims as many rows as are multiplied
                __m512i keys[V][2];
                for (int v = 0; v < V; ++v)
                    cells.widen(quarters<V>(tile.keys + key + v, part.first + d, left), keys[v]);
                for (int i = 0; i < 2; ++i) {
                    for (int n = 0; n < N; ++n) {
                        const __m512i q = _mm512_load_si512(queries + n * width + 4 * d + 32 * i);
                        for (int v = 0; v < V; ++v) sums[n * V + v] = dot(sums[n * V + v], q, keys[v][i]);
                    }
                }
            };
            int d = 0;
            for (; d + DIMS <= part.dims; d += DIMS) add(d, DIMS);
            if (d < part.dims) add(d, part.dims - d);
            for (int n = 0; n < N; n += 4 / V) store<N, V>(n, sum_quarters(sums + n * V), to + key);
        }
        ahead = asking;
    }

    // 16 codes of each of four keys, `V` apart; zeros from the `left`-th on.
    template <int V>
    static KVSPAN_INLINE __m512i quarters(const Element* const* keys, int d, int left) {
        __m512i all = _mm512_castsi128_si512(quarter(keys[0] + d, left));
        all = _mm512_inserti32x4(all, quarter(keys[V] + d, left), 1);
        all = _mm512_inserti32x4(all, quarter(keys[2 * V] + d, left), 2);
        return _mm512_inserti32x4(all, quarter(keys[3 * V] + d, left), 3);
    }

    static KVSPAN_INLINE __m128i quarter(const Element* p, int left) {
        if (left >= DIMS) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << left) - 1), p);
    }

    // Scores of lane n; where V is 2 they share a vector with those of the lane behind, two keys by turns.
    template <int N, int V>
    static KVSPAN_INLINE void store(int n, __m512 scores, float* to) {
        float* here = to + n * TILE_KEYS;
        if constexpr (V == 4) {
            _mm512_store_ps(here, scores);
        } else {
            const __m512i by_lane = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
            const __m512d lanes = _mm512_permutexvar_pd(by_lane, _mm512_castps_pd(scores));
            _mm256_store_ps(here, _mm256_castpd_ps(_mm512_castpd512_pd256(lanes)));
            if (n + 1 == N) return;
            _mm256_store_ps(here + TILE_KEYS, _mm256_castpd_ps(_mm512_extractf64x4_pd(lanes, 1)));
        }
    }
};

}  // namespace
}  // namespace kvspan
