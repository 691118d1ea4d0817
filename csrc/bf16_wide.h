// Attention of many heads over the same keys: the heads are the lanes of a vector. Each two dims of a key are
// broadcast to all lanes, so that keys are read as they lie in the cache: neither they nor values are
// rearranged in memory. For files compiled for AVX-512-BF16 alone.
//
// Knows vectors of bf16 in their own order; `Bf16Dot` decides when this pays and makes them of other
// elements.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bf16.h"
#include "flash.h"

namespace kvspan {
namespace {

constexpr int WIDE = 16;  // lanes of a vector

// Lanes that have room for `lanes` of them.
inline int wide_lanes(int lanes) { return (lanes + WIDE - 1) / WIDE * WIDE; }

// Queries by pairs of dims, [pairs, wide_lanes(lanes)] words.
struct WideQuery {
    const std::int32_t* words;
    int lanes;

    int stride() const { return wide_lanes(lanes); }
};

// The rows of a tile.
struct WideRows {
    const Bf16* const* rows;
    int count;
};

KVSPAN_INLINE std::int32_t word_at(const Bf16* p) {
    std::int32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return word;
}

KVSPAN_INLINE void transpose_words(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Sixteen lanes.
struct Whole {
    using Sums = __m512;
    static Sums zero() { return _mm512_setzero_ps(); }
    static Sums add(Sums a, Sums b) { return _mm512_add_ps(a, b); }
    static __m512i words(const std::int32_t* p) { return _mm512_load_si512(p); }
    static __m512i splat(std::int32_t word) { return _mm512_set1_epi32(word); }
    static Sums dot(Sums sum, __m512i a, __m512i b) { return kvspan::dot(sum, a, b); }
    static __m512i row(Sums sums) { return (__m512i)sums; }
};

// Eight.
struct Half {
    using Sums = __m256;
    static Sums zero() { return _mm256_setzero_ps(); }
    static Sums add(Sums a, Sums b) { return _mm256_add_ps(a, b); }
    static __m256i words(const std::int32_t* p) { return _mm256_load_si256((const __m256i*)p); }
    static __m256i splat(std::int32_t word) { return _mm256_set1_epi32(word); }
    static Sums dot(Sums sum, __m256i a, __m256i b) {
        return _mm256_dpbf16_ps(sum, (__m256bh)a, (__m256bh)b);
    }
    static __m512i row(Sums sums) { return _mm512_zextsi256_si512((__m256i)sums); }
};

template <class Vector, int V>
struct WideScores {
    using Sums = typename Vector::Sums;
    static constexpr int KEYS = 8, PASSES = V == 1 ? 2 : 1;  // enough sums to hide a dot's latency

    // Scores of V vectors of lanes, from `lane` on, over `dims` dims, into to[lane][TILE_KEYS].
    template <class T>
    static void run(const WideRows& tile, int dims, const WideQuery& query, int lane, Ahead<T>& ahead,
                    float* to) {
        Sums sums[TILE_KEYS][V];
        for (int key = 0; key < tile.count; key += KEYS) add(tile, key, dims, query, lane, ahead, &sums[key]);
        for (int v = 0; v < V; ++v) {
            const int here = lane + v * WIDE, left = query.lanes - here;
            for (int key = 0; key < tile.count; key += WIDE) {
                __m512i rows[WIDE];
                for (int k = 0; k < WIDE; ++k) rows[k] = Vector::row(sums[key + k][v]);
                transpose_words(rows);
                for (int n = 0; n < WIDE && n < left; ++n)
                    _mm512_store_si512(to + (here + n) * TILE_KEYS + key, rows[n]);
            }
        }
    }

private:
    template <class T>
    KVSPAN_APART static void add(const WideRows& tile, int key, int dims, const WideQuery& query, int lane,
                                 Ahead<T>& ahead, Sums (*to)[V]) {
        const Bf16* keys[KEYS];
        for (int k = 0; k < KEYS; ++k) keys[k] = tile.rows[key + k];
        const std::int32_t* asked = query.words + lane;
        Ahead<T> asking = ahead;
        Sums sums[PASSES][KEYS][V];
#pragma GCC unroll 24  // else they begin in memory
        for (int i = 0; i < PASSES * KEYS * V; ++i)
            sums[i / (KEYS * V)][i / V % KEYS][i % V] = Vector::zero();
        for (int d = 0; d < dims; d += 2 * PASSES) {
            asking.ask_line();
            for (int c = 0; c < PASSES; ++c, asked += query.stride()) {
                decltype(Vector::words(asked)) q[V];
                for (int v = 0; v < V; ++v) q[v] = Vector::words(asked + v * WIDE);
                for (int k = 0; k < KEYS; ++k) {
                    const auto word = Vector::splat(word_at(keys[k] + d + 2 * c));
                    for (int v = 0; v < V; ++v) sums[c][k][v] = Vector::dot(sums[c][k][v], q[v], word);
                }
            }
        }
        ahead = asking;
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; ++k) {
            for (int v = 0; v < V; ++v)
                to[k][v] = PASSES == 1 ? sums[0][k][v] : Vector::add(sums[0][k][v], sums[PASSES - 1][k][v]);
        }
    }
};

// Scores of all lanes over `dims` dims, which are a multiple of 4, into to[lanes][TILE_KEYS].
template <class T>
inline void wide_scores(const WideRows& tile, int dims, const WideQuery& query, Ahead<T>& ahead, float* to) {
    for (int lane = 0; lane < query.lanes;) {
        const int left = query.lanes - lane;
        int taken = WIDE;
        if (left <= WIDE / 2) {
            WideScores<Half, 1>::run(tile, dims, query, lane, ahead, to);
        } else if (left <= WIDE) {
            WideScores<Whole, 1>::run(tile, dims, query, lane, ahead, to);
        } else if (left <= 2 * WIDE || (left > 3 * WIDE && left <= 4 * WIDE)) {
            WideScores<Whole, 2>::run(tile, dims, query, lane, ahead, to);
            taken = 2 * WIDE;
        } else {
            WideScores<Whole, 3>::run(tile, dims, query, lane, ahead, to);
            taken = 3 * WIDE;
        }
        lane += taken;
    }
}

}  // namespace
}  // namespace kvspan
