// Attention of many heads over the same keys: the heads are the lanes of a vector. Each few dims of a key are
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

constexpr int WIDE = 16;             // lanes of a vector
constexpr int HALF_WIDE = WIDE / 2;  // up to so many, a vector has each lane twice

// Lanes that have room for `lanes` of them.
inline int wide_lanes(int lanes) { return (lanes + WIDE - 1) / WIDE * WIDE; }

// Queries by pairs of dims, [pairs, wide_lanes(lanes)] words; of up to HALF_WIDE lanes by two pairs,
// [pairs / 2, HALF_WIDE, 2].
struct WideQuery {
    const std::int32_t* words;
    int lanes;

    int stride() const { return stride_of(lanes); }

    static int stride_of(int lanes) { return lanes <= HALF_WIDE ? HALF_WIDE : wide_lanes(lanes); }

    static int at(int pair, int lane, int lanes) {
        return lanes <= HALF_WIDE ? pair / 2 * WIDE + 2 * lane + pair % 2 : pair * stride_of(lanes) + lane;
    }
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

template <int V>
struct WideScores {
    static constexpr int KEYS = 8, PASSES = V == 1 ? 2 : 1;  // enough sums to hide a dot's latency, 13 cycles

    // Scores of V vectors of lanes, from `lane` on, over `dims` dims, into to[lane][TILE_KEYS].
    template <class T>
    static void run(const WideRows& tile, int dims, const WideQuery& query, int lane, Ahead<T>& ahead,
                    float* to) {
        __m512 sums[TILE_KEYS][V];
        for (int key = 0; key < tile.count; key += KEYS)
            add(tile.rows + key, dims, query, lane, ahead, &sums[key]);
        for (int v = 0; v < V; ++v) {
            const int here = lane + v * WIDE, left = query.lanes - here;
            for (int key = 0; key < tile.count; key += WIDE) {
                __m512i rows[WIDE];
                for (int k = 0; k < WIDE; ++k) rows[k] = (__m512i)sums[key + k][v];
                transpose_words(rows);
                for (int n = 0; n < WIDE && n < left; ++n)
                    _mm512_store_si512(to + (here + n) * TILE_KEYS + key, rows[n]);
            }
        }
    }

private:
    // Of a key all passes follow one another: the same place in lines of neighbouring keys is in one bank of
    // the cache, which is read once a cycle.
    template <class T>
    KVSPAN_APART static void add(const Bf16* const* rows, int dims, const WideQuery& query, int lane,
                                 Ahead<T>& ahead, __m512 (*to)[V]) {
        const Bf16* keys[KEYS];
        for (int k = 0; k < KEYS; ++k) keys[k] = rows[k];
        const std::int32_t* asked = query.words + lane;
        const int stride = query.stride();
        Ahead<T> asking = ahead;
        __m512 sums[PASSES][KEYS][V];
#pragma GCC unroll 24  // else they begin in memory
        for (int i = 0; i < PASSES * KEYS * V; ++i)
            sums[i / (KEYS * V)][i / V % KEYS][i % V] = _mm512_setzero_ps();
        for (int d = 0; d < dims; d += 2 * PASSES, asked += PASSES * stride) {
            asking.ask_line();
            __m512i q[PASSES][V];
            for (int c = 0; c < PASSES; ++c) {
                for (int v = 0; v < V; ++v) q[c][v] = _mm512_load_si512(asked + c * stride + v * WIDE);
            }
#pragma GCC unroll 8
            for (int k = 0; k < KEYS; ++k) {
                for (int c = 0; c < PASSES; ++c) {
                    const __m512i word = _mm512_set1_epi32(word_at(keys[k] + d + 2 * c));
                    for (int v = 0; v < V; ++v) sums[c][k][v] = dot(sums[c][k][v], q[c][v], word);
                }
            }
        }
        ahead = asking;
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; ++k) {
            for (int v = 0; v < V; ++v)
                to[k][v] = PASSES == 1 ? sums[0][k][v] : _mm512_add_ps(sums[0][k][v], sums[PASSES - 1][k][v]);
        }
    }
};

// Scores of at most half a vector of lanes, each of them twice: a step is four dims of a key, whose two
// products with a lane are two sums, added in the end. Dims are multiples of 8.
struct HalfScores {
    // Scores over `dims` dims into to[lane][TILE_KEYS].
    template <class T>
    static void run(const WideRows& tile, int dims, const WideQuery& query, Ahead<T>& ahead, float* to) {
        __m512 sums[TILE_KEYS];
        for (int key = 0; key < tile.count; key += KEYS)
            add(tile.rows + key, dims, query.words, ahead, &sums[key]);
        for (int key = 0; key < tile.count; key += WIDE) put(&sums[key], query.lanes, to + key);
    }

private:
    static constexpr int KEYS = 8;
    static constexpr int SHORT = 128;  // dims of rows that are asked for whole; of others lines are,
    static constexpr int CHUNK = 64;   // beside so many dims

    // A key's two steps follow one another for the same reason.
    template <class T>
    KVSPAN_APART static void add(const Bf16* const* rows, int dims, const std::int32_t* asked,
                                 Ahead<T>& ahead, __m512* to) {
        const Bf16* keys[KEYS];
        for (int k = 0; k < KEYS; ++k) keys[k] = rows[k];
        __m512 first[KEYS], second[KEYS];
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; ++k) first[k] = second[k] = _mm512_setzero_ps();
        if (dims <= SHORT) ahead.ask(KEYS);
        for (int d = 0; d < dims;) {
            for (int i = 0; dims > SHORT && i < 2 * KEYS; ++i) ahead.ask_line();
            for (const int end = d + CHUNK < dims ? d + CHUNK : dims; d < end; d += 8, asked += 2 * WIDE) {
                const __m512i a = _mm512_load_si512(asked), b = _mm512_load_si512(asked + WIDE);
#pragma GCC unroll 8
                for (int k = 0; k < KEYS; ++k) {
                    first[k] = dot(first[k], a, _mm512_set1_epi64(four_at(keys[k] + d)));
                    second[k] = dot(second[k], b, _mm512_set1_epi64(four_at(keys[k] + d + 4)));
                }
            }
        }
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; ++k) to[k] = _mm512_add_ps(first[k], second[k]);
    }

    static KVSPAN_INLINE long long four_at(const Bf16* p) {
        long long four;
        __builtin_memcpy(&four, p, sizeof four);
        return four;
    }

    // Of sixteen keys: sums become whole, four keys of a lane come together, then all of them.
    static KVSPAN_INLINE void put(const __m512* sums, int lanes, float* to) {
        __m512 fours[2][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512 a = whole(sums[4 * i], sums[4 * i + 1]), b = whole(sums[4 * i + 2], sums[4 * i + 3]);
            fours[0][i] = _mm512_shuffle_ps(a, b, 0x88);
            fours[1][i] = _mm512_shuffle_ps(a, b, 0xdd);
        }
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
            const __m512(&f)[4] = fours[odd];
            const __m512 a = _mm512_shuffle_f32x4(f[0], f[1], 0x44);
            const __m512 b = _mm512_shuffle_f32x4(f[2], f[3], 0x44);
            const __m512 c = _mm512_shuffle_f32x4(f[0], f[1], 0xee);
            const __m512 d = _mm512_shuffle_f32x4(f[2], f[3], 0xee);
            put_lane(0 + odd, lanes, _mm512_shuffle_f32x4(a, b, 0x88), to);
            put_lane(2 + odd, lanes, _mm512_shuffle_f32x4(a, b, 0xdd), to);
            put_lane(4 + odd, lanes, _mm512_shuffle_f32x4(c, d, 0x88), to);
            put_lane(6 + odd, lanes, _mm512_shuffle_f32x4(c, d, 0xdd), to);
        }
    }

    // Of two keys, whose lanes then lie in turn by twos.
    static KVSPAN_INLINE __m512 whole(__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    }

    static KVSPAN_INLINE void put_lane(int lane, int lanes, __m512 scores, float* to) {
        if (lane < lanes) _mm512_store_ps(to + lane * TILE_KEYS, scores);
    }
};

// Scores of all lanes over `dims` dims, which are a multiple of 4, into to[lanes][TILE_KEYS].
template <class T>
inline void wide_scores(const WideRows& tile, int dims, const WideQuery& query, Ahead<T>& ahead, float* to) {
    if (query.lanes <= HALF_WIDE) return HalfScores::run(tile, dims, query, ahead, to);
    for (int lane = 0; lane < query.lanes;) {
        const int left = query.lanes - lane;
        int taken = WIDE;
        if (left <= WIDE) {
            WideScores<1>::run(tile, dims, query, lane, ahead, to);
        } else if (left <= 2 * WIDE || (left > 3 * WIDE && left <= 4 * WIDE)) {
            WideScores<2>::run(tile, dims, query, lane, ahead, to);
            taken = 2 * WIDE;
        } else {
            WideScores<3>::run(tile, dims, query, lane, ahead, to);
            taken = 3 * WIDE;
        }
        lane += taken;
    }
}

}  // namespace
}  // namespace kvspan
