// Attention over a bf16 cache by AVX-512's dot product of bf16 pairs, which sums in float32.
//
// Scores of few lanes are dot products over a key's dims, sixteen at a time, reduced by one tree of
// shuffles. For many lanes the tile of keys is transposed first, once, and lanes go over it in register
// blocks. Values need no packing: two keys' dims are interleaved on the way in, which leaves the dims of
// the output in an order that `finish` puts right.
#pragma once

#include <immintrin.h>

#include "flash.h"
#include "vectors.h"

namespace kvspan {
namespace {

struct Bf16Dot {
    using Element = Bf16;
    static constexpr int LANES = 6;  // of a register block, with 4 vectors each

    static float largest(const float* scores) {
        const __m512 a = _mm512_max_ps(_mm512_load_ps(scores), _mm512_load_ps(scores + 16));
        const __m512 b = _mm512_max_ps(_mm512_load_ps(scores + 32), _mm512_load_ps(scores + 48));
        return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    }

    static float exp2(float x) { return kvspan::exp2(splat(x))[0]; }

    static void load_query(const Attention& call, const Unit& unit, const Scratch& scratch) {
        const int dim = call.head_dim, width = padded(dim);
        for (int lane = 0; lane < unit.lanes(); ++lane) {
            const Bf16* from = static_cast<const Bf16*>(call.query) +
                               (unit.first_row + lane / unit.heads) * call.query_row_stride +
                               (unit.first_head + lane % unit.heads) * call.query_head_stride;
            Bf16* to = query_of(scratch, lane, width);
            for (int d = 0; d < width; d += 32) _mm512_store_si512(to + d, dims(from + d, dim - d));
        }
    }

    static void scores(const Attention& call, int lanes, const Tile<Bf16>& tile, const Tile<Bf16>& next,
                       const Scratch& scratch) {
        // A reduction costs about 3 instructions a lane and key, a transposition 0.2 a dim and key.
        if (lanes * 16 <= call.head_dim + 16) return few_lanes(call, lanes, tile, next, scratch);
        transpose(call, tile, next, scratch);
        int lane = 0;
        for (; lane + LANES <= lanes; lane += LANES) many_lanes<LANES>(call, lane, scratch);
        for (; lane + 2 <= lanes; lane += 2) many_lanes<2>(call, lane, scratch);
        for (; lane < lanes; ++lane) many_lanes<1>(call, lane, scratch);
    }

    static float weigh(const Scratch& scratch, int lane, float scale, float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        auto* weights = weights_of(scratch, lane);
        Vec total{};
        for (int i = 0; i < TILE_KEYS; i += 32) {
            const Vec low = kvspan::exp2(load(scores + i) * scale - max);
            const Vec high = kvspan::exp2(load(scores + i + 16) * scale - max);
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            _mm512_store_si512(weights + i / 2, (__m512i)both);
            total += low + high;
        }
        return sum(total);
    }

    static void accumulate(const Attention& call, int lanes, const Tile<Bf16>& tile,
                           const Tile<Bf16>& next, const Scratch& scratch, const float* fade,
                           float* out) {
        int lane = 0;
        for (; lane + LANES <= lanes; lane += LANES)
            add<LANES>(call, lane, tile, next, scratch, fade, out);
        switch (lanes - lane) {
            case 5:
                return add<5>(call, lane, tile, next, scratch, fade, out);
            case 4:
                return add<4>(call, lane, tile, next, scratch, fade, out);
            case 3:
                return add<3>(call, lane, tile, next, scratch, fade, out);
            case 2:
                return add<2>(call, lane, tile, next, scratch, fade, out);
            case 1:
                return add<1>(call, lane, tile, next, scratch, fade, out);
            default:
                return;
        }
    }

    static void finish(const Attention& call, int lanes, float* out) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        const std::int64_t size = static_cast<std::int64_t>(lanes) * padded(call.value_dim);
        for (std::int64_t i = 0; i < size; i += 32) {
            const __m512i low = _mm512_load_si512(out + i), high = _mm512_load_si512(out + i + 16);
            _mm512_store_si512(out + i, _mm512_permutex2var_epi64(low, first, high));
            _mm512_store_si512(out + i + 16, _mm512_permutex2var_epi64(low, second, high));
        }
    }

private:
    static Bf16* query_of(const Scratch& scratch, int lane, int width) {
        return reinterpret_cast<Bf16*>(scratch.query) + static_cast<std::int64_t>(lane) * width;
    }

    // Pairs of weights of neighbouring keys, each pair a word.
    static std::int32_t* weights_of(const Scratch& scratch, int lane) {
        return reinterpret_cast<std::int32_t*>(scratch.weights) + lane * (TILE_KEYS / 2);
    }

    // 32 dims of a vector, or zeros from the `left`-th on.
    static __m512i dims(const Bf16* p, int left) {
        if (left >= 32) return _mm512_loadu_si512(p);
        return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << left) - 1, p);
    }

    static __m512 dot(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }

    static void fetch(const Bf16* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

    static bool values_within_keys(const Tile<Bf16>& tile, int head_dim) {
        return tile.values[0] >= tile.keys[0] && tile.values[0] < tile.keys[0] + head_dim;
    }

    // Lane i of the result is the sum of sums[i].
    static __m512 reduce(const __m512 (&sums)[16]) {
        __m512 a[8], b[4];
        for (int i = 0; i < 8; ++i) {
            a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(sums[i], sums[i + 8], 0x44),
                                 _mm512_shuffle_f32x4(sums[i], sums[i + 8], 0xee));
        }
        for (int i = 0; i < 4; ++i) {
            b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
                                 _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
        }
        const __m512 c = _mm512_add_ps(_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1]));
        const __m512 d = _mm512_add_ps(_mm512_unpacklo_ps(b[2], b[3]), _mm512_unpackhi_ps(b[2], b[3]));
        const __m512 e = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
        return _mm512_shuffle_f32x4(e, e, 0xd8);
    }

    static void few_lanes(const Attention& call, int lanes, const Tile<Bf16>& tile,
                          const Tile<Bf16>& next, const Scratch& scratch) {
        int lane = 0;
        for (; lane + 4 <= lanes; lane += 4) dots<4, 4>(call, lane, tile, next, scratch);
        switch (lanes - lane) {
            case 3:
                return dots<3, 4>(call, lane, tile, next, scratch);
            case 2:
                return dots<2, 8>(call, lane, tile, next, scratch);
            case 1:
                return dots<1, 16>(call, lane, tile, next, scratch);
            default:
                return;
        }
    }

    template <int N, int KEYS>
    static void dots(const Attention& call, int lane, const Tile<Bf16>& tile, const Tile<Bf16>& next,
                     const Scratch& scratch) {
        const int dim = call.head_dim, width = padded(dim);
        const Bf16* query = query_of(scratch, lane, width);
        const bool ahead = lane == 0 && next.seen;
        for (int key = 0; key < tile.count; key += KEYS) {
            __m512 sums[16];
            for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
            for (int d = 0; d < dim; d += 32) {
                __m512i keys[KEYS];
                for (int k = 0; k < KEYS; ++k) {
                    keys[k] = dims(tile.keys[key + k] + d, dim - d);
                    if (ahead) fetch(next.keys[key + k] + d);
                }
                for (int n = 0; n < N; ++n) {
                    const __m512i q = _mm512_load_si512(query + n * width + d);
                    for (int k = 0; k < KEYS; ++k)
                        sums[n * KEYS + k] = dot(sums[n * KEYS + k], q, keys[k]);
                }
            }
            alignas(64) float scores[16];
            _mm512_store_ps(scores, reduce(sums));
            for (int n = 0; n < N; ++n) {
                __builtin_memcpy(scratch.scores + (lane + n) * TILE_KEYS + key, scores + n * KEYS,
                                 KEYS * 4);
            }
        }
    }

    // packed[d / 2][key] = dims d and d + 1 of each key.
    static void transpose(const Attention& call, const Tile<Bf16>& tile, const Tile<Bf16>& next,
                          const Scratch& scratch) {
        auto* packed = reinterpret_cast<std::int32_t*>(scratch.packed);
        const int dim = call.head_dim;
        for (int key = 0; key < tile.count; key += 16) {
            for (int d = 0; d < dim; d += 32) {
                __m512i rows[16];
                for (int k = 0; k < 16; ++k) {
                    rows[k] = dims(tile.keys[key + k] + d, dim - d);
                    if (next.seen) fetch(next.keys[key + k] + d);
                }
                transpose_words(rows);
                for (int k = 0; k < 16; ++k)
                    _mm512_store_si512(packed + (d / 2 + k) * TILE_KEYS + key, rows[k]);
            }
        }
    }

    static void transpose_words(__m512i (&r)[16]) {
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

    template <int N>
    static void many_lanes(const Attention& call, int lane, const Scratch& scratch) {
        const int width = padded(call.head_dim);
        const auto* packed = reinterpret_cast<const std::int32_t*>(scratch.packed);
        const auto* query = reinterpret_cast<const std::int32_t*>(query_of(scratch, lane, width));
        __m512 sums[N][4];
        for (auto& row : sums) {
            for (auto& sum : row) sum = _mm512_setzero_ps();
        }
        for (int pair = 0; pair < width / 2; ++pair) {
            __m512i keys[4];
            for (int k = 0; k < 4; ++k) keys[k] = _mm512_load_si512(packed + pair * TILE_KEYS + k * 16);
            for (int n = 0; n < N; ++n) {
                const __m512i q = _mm512_set1_epi32(query[n * (width / 2) + pair]);
                for (int k = 0; k < 4; ++k) sums[n][k] = dot(sums[n][k], q, keys[k]);
            }
        }
        for (int n = 0; n < N; ++n) {
            for (int k = 0; k < 4; ++k) {
                _mm512_store_ps(scratch.scores + (lane + n) * TILE_KEYS + k * 16, sums[n][k]);
            }
        }
    }

    template <int N>
    static void add(const Attention& call, int lane, const Tile<Bf16>& tile, const Tile<Bf16>& next,
                    const Scratch& scratch, const float* fade, float* out) {
        const int dim = call.value_dim;
        const bool ahead = lane == 0 && next.seen && !values_within_keys(next, call.head_dim);
        int d = 0;
        for (; d + 64 <= dim; d += 64)
            add_dims<N, 2>(dim, lane, d, tile, next, ahead, scratch, fade, out);
        for (; d < dim; d += 32) add_dims<N, 1>(dim, lane, d, tile, next, ahead, scratch, fade, out);
    }

    // `C` times 32 dims from `d` on.
    template <int N, int C>
    static void add_dims(int dim, int lane, int d, const Tile<Bf16>& tile, const Tile<Bf16>& next,
                         bool ahead, const Scratch& scratch, const float* fade, float* out) {
        const int width = padded(dim);
        const std::int32_t* weights = weights_of(scratch, lane);
        __m512 sums[N][2 * C];
        for (int n = 0; n < N; ++n) {
            const __m512 factor = _mm512_set1_ps(fade[lane + n]);
            for (int c = 0; c < 2 * C; ++c) {
                const float* at = out + static_cast<std::int64_t>(lane + n) * width + d + c * 16;
                sums[n][c] = _mm512_mul_ps(_mm512_load_ps(at), factor);
            }
        }
        for (int key = 0; key < tile.count; key += 2) {
            __m512i pairs[2 * C];
            for (int c = 0; c < C; ++c) {
                const __m512i even = dims(tile.values[key] + d + 32 * c, dim - d - 32 * c);
                const __m512i odd = dims(tile.values[key + 1] + d + 32 * c, dim - d - 32 * c);
                pairs[2 * c] = _mm512_unpacklo_epi16(even, odd);
                pairs[2 * c + 1] = _mm512_unpackhi_epi16(even, odd);
                if (ahead)
                    fetch(next.values[key] + d + 32 * c), fetch(next.values[key + 1] + d + 32 * c);
            }
            for (int n = 0; n < N; ++n) {
                const __m512i weight = _mm512_set1_epi32(weights[n * (TILE_KEYS / 2) + key / 2]);
                for (int c = 0; c < 2 * C; ++c) sums[n][c] = dot(sums[n][c], weight, pairs[c]);
            }
        }
        for (int n = 0; n < N; ++n) {
            for (int c = 0; c < 2 * C; ++c) {
                _mm512_store_ps(out + static_cast<std::int64_t>(lane + n) * width + d + c * 16,
                                sums[n][c]);
            }
        }
    }
};

}  // namespace
}  // namespace kvspan
