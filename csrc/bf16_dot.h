// Attention of bf16 queries by AVX-512's dot product of bf16 pairs, which sums in float32, over whatever
// `Cells` turn into bf16.
//
// Scores of few lanes are dot products over a key's dims, sixteen at a time, reduced by one tree of
// shuffles. For many lanes the tile of keys is transposed first, once, and lanes go over it in register
// blocks; so are values paired first, once. Dims may be in an order that `Cells` likes, from the query to
// the output, where `finish` puts it right.
#pragma once

#include "bf16.h"
#include "cells.h"
#include "flash.h"
#include "vectors.h"

namespace kvspan {
namespace {

template <class Cells>
struct Bf16Dot {
    using Element = typename Cells::Element;
    static constexpr int DIMS = Cells::DIMS, VECTORS = Cells::VECTORS;
    static constexpr int LANES = 6;         // of a register block, with 4 vectors each
    static constexpr int CHUNK = 64;        // dims of such a block
    static constexpr int PAIRED_LANES = 12;  // from here on values are paired once for all lanes

    static float largest(const float* scores) {
        const __m512 a = _mm512_max_ps(_mm512_load_ps(scores), _mm512_load_ps(scores + 16));
        const __m512 b = _mm512_max_ps(_mm512_load_ps(scores + 32), _mm512_load_ps(scores + 48));
        return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    }

    static float exp2(float x) { return kvspan::exp2(splat(x))[0]; }

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const int width = query_width(call);
        for (int lane = 0; lane < unit.head_lanes(); ++lane) {
            const Place place = place_of(call, unit, first + lane);
            const Bf16* from = static_cast<const Bf16*>(call.query) +
                               place.row * call.query_row_stride +
                               place.head * call.query_head_stride;
            Bf16* to = query_of(scratch, lane, width);
            for (int part = 0; part < MAX_PARTS; from += call.part_dims[part++]) {
                for (int d = 0; d < call.part_dims[part]; d += DIMS, to += DIMS) {
                    __m512i vectors[VECTORS];
                    for (int v = 0; v < VECTORS; ++v)
                        vectors[v] = dims(from + d + 32 * v, call.part_dims[part] - d - 32 * v);
                    Cells::arrange(vectors);
                    for (int v = 0; v < VECTORS; ++v) _mm512_store_si512(to + 32 * v, vectors[v]);
                }
            }
        }
    }

    static void scores(const Attention& call, int lanes, const Tile<Element>& tile,
                       const Tile<Element>& next, const Scratch& scratch, const Part& part, float* to) {
        const Query query{query_of(scratch, 0, 0) + (part.number ? whole(call.part_dims[0]) : 0),
                          query_width(call)};
        // A reduction costs about 3 instructions a lane and key, a transposition 0.2 a dim and key.
        if (lanes * 16 <= call.head_dim + 16) return few_lanes(lanes, tile, next, query, part, to);
        transpose(tile, next, scratch, part);
        int lane = 0;
        const int pairs = whole(part.dims) / 2;
        for (; lane + LANES <= lanes; lane += LANES) many_lanes<LANES>(pairs, lane, query, scratch, to);
        for (; lane + 2 <= lanes; lane += 2) many_lanes<2>(pairs, lane, query, scratch, to);
        for (; lane < lanes; ++lane) many_lanes<1>(pairs, lane, query, scratch, to);
    }

    static float weigh(const Tile<Element>& tile, const Scratch& scratch, int lane, float scale,
                       float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        auto* weights = weights_of(scratch, lane);
        Vec total{};
        for (int i = 0; i < TILE_KEYS; i += 32) {
            Vec low = kvspan::exp2(load(scores + i) * scale - max);
            Vec high = kvspan::exp2(load(scores + i + 16) * scale - max);
            total += low + high;
            if constexpr (IS_CODE<Element>) {
                low *= load(tile.value_scales + i);
                high *= load(tile.value_scales + i + 16);
            }
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            _mm512_store_si512(weights + i / 2, (__m512i)both);
        }
        return sum(total);
    }

    static void accumulate(const Attention& call, int lanes, const Tile<Element>& tile,
                           const Tile<Element>& next, const Scratch& scratch, const float* fade,
                           float* out) {
        const Cells cells;
        const bool ahead = next.seen && !values_within_keys(next, call.head_dim);
        const Sum sum{call.value_dim, tile, scratch, fade, out};
        if (lanes >= PAIRED_LANES) {
            pair(call.value_dim, cells, tile, next, ahead, scratch);
            const auto paired = [&](int d, int key, __m512i (&to)[4], bool) __attribute__((always_inline)) {
                for (int i = 0; i < 4; ++i) to[i] = _mm512_load_si512(paired_at(scratch, d, key) + 16 * i);
            };
            return add_all(sum, lanes, paired);
        }
        const auto in_place = [&](int d, int key, __m512i (&to)[4], bool is_first) __attribute__((always_inline)) {
            for (int i = 0; i < CHUNK; i += DIMS) {
                const int left = call.value_dim - d - i;
                cells.pairs(tile.values[key] + d + i, tile.values[key + 1] + d + i, left,
                            to + i / 16);
                if (is_first && ahead && left > 0) {
                    fetch_line(next.values[key] + d + i);
                    fetch_line(next.values[key + 1] + d + i);
                }
            }
        };
        add_all(sum, lanes, in_place);
    }

    static void finish(const Attention& call, int lanes, float* out) {
        const std::int64_t size = static_cast<std::int64_t>(lanes) * padded(call.value_dim);
        for (std::int64_t i = 0; i < size; i += DIMS) Cells::restore(out + i);
    }

private:
    // The query's vectors of one part, lane by lane.
    struct Query {
        const Bf16* data;
        int width;

        const Bf16* of(int lane) const { return data + static_cast<std::int64_t>(lane) * width; }
    };

    struct Sum {
        int dim;
        const Tile<Element>& tile;
        const Scratch& scratch;
        const float* fade;
        float* out;
    };

    static int whole(int dims) { return (dims + DIMS - 1) / DIMS * DIMS; }

    static int query_width(const Attention& call) {
        return whole(call.part_dims[0]) + whole(call.part_dims[1]);
    }

    static Bf16* query_of(const Scratch& scratch, int lane, int width) {
        return reinterpret_cast<Bf16*>(scratch.query) + static_cast<std::int64_t>(lane) * width;
    }

    // Pairs of weights of neighbouring keys, each pair a word.
    static std::int32_t* weights_of(const Scratch& scratch, int lane) {
        return reinterpret_cast<std::int32_t*>(scratch.weights) + lane * (TILE_KEYS / 2);
    }

    // Of keys `key` and `key + 1`, CHUNK dims from `d` on.
    static std::int32_t* paired_at(const Scratch& scratch, int d, int key) {
        return reinterpret_cast<std::int32_t*>(scratch.paired) + d * (TILE_KEYS / 2) + key * (CHUNK / 2);
    }

    static bool values_within_keys(const Tile<Element>& tile, int head_dim) {
        return tile.values[0] >= tile.keys[0] && tile.values[0] < tile.keys[0] + head_dim;
    }

    static void few_lanes(int lanes, const Tile<Element>& tile, const Tile<Element>& next,
                          const Query& query, const Part& part, float* to) {
        int lane = 0;
        for (; lane + 4 <= lanes; lane += 4) dots<4, 4>(lane, tile, next, query, part, to);
        switch (lanes - lane) {
            case 3:
                return dots<3, 4>(lane, tile, next, query, part, to);
            case 2:
                return dots<2, 8>(lane, tile, next, query, part, to);
            case 1:
                return dots<1, 16>(lane, tile, next, query, part, to);
            default:
                return;
        }
    }

    template <int N, int KEYS>
    static void dots(int lane, const Tile<Element>& tile, const Tile<Element>& next, const Query& query,
                     const Part& part, float* to) {
        const Cells cells;
        const bool ahead = lane == 0 && next.seen;
        for (int key = 0; key < tile.count; key += KEYS) {
            __m512 sums[16];
            for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
            for (int d = 0; d < part.dims; d += DIMS) {
                __m512i asked[N][VECTORS];
                for (int n = 0; n < N; ++n) {
                    for (int v = 0; v < VECTORS; ++v)
                        asked[n][v] = _mm512_load_si512(query.of(lane + n) + d + 32 * v);
                }
                for (int k = 0; k < KEYS; ++k) {
                    __m512i vectors[VECTORS];
                    cells.load(tile.keys[key + k] + part.first + d, part.dims - d, vectors);
                    if (ahead) fetch_line(next.keys[key + k] + part.first + d);
                    for (int v = 0; v < VECTORS; ++v) {
                        for (int n = 0; n < N; ++n)
                            sums[n * KEYS + k] = dot(sums[n * KEYS + k], asked[n][v], vectors[v]);
                    }
                }
            }
            alignas(64) float scores[16];
            _mm512_store_ps(scores, reduce(sums));
            for (int n = 0; n < N; ++n)
                __builtin_memcpy(to + (lane + n) * TILE_KEYS + key, scores + n * KEYS, KEYS * 4);
        }
    }

    // packed[d / 2][key] = dims d and d + 1 of each key.
    static void transpose(const Tile<Element>& tile, const Tile<Element>& next, const Scratch& scratch,
                          const Part& part) {
        const Cells cells;
        auto* packed = reinterpret_cast<std::int32_t*>(scratch.packed);
        for (int key = 0; key < tile.count; key += 16) {
            for (int d = 0; d < part.dims; d += DIMS) {
                __m512i rows[VECTORS][16];
                for (int k = 0; k < 16; ++k) {
                    __m512i vectors[VECTORS];
                    cells.load(tile.keys[key + k] + part.first + d, part.dims - d, vectors);
                    if (next.seen) fetch_line(next.keys[key + k] + part.first + d);
                    for (int v = 0; v < VECTORS; ++v) rows[v][k] = vectors[v];
                }
                for (int v = 0; v < VECTORS; ++v) {
                    transpose_words(rows[v]);
                    for (int k = 0; k < 16; ++k) {
                        _mm512_store_si512(packed + (d / 2 + 16 * v + k) * TILE_KEYS + key, rows[v][k]);
                    }
                }
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
    static void many_lanes(int pairs, int lane, const Query& query, const Scratch& scratch, float* to) {
        const auto* packed = reinterpret_cast<const std::int32_t*>(scratch.packed);
        const auto* asked = reinterpret_cast<const std::int32_t*>(query.of(lane));
        __m512 sums[N][4];
        for (auto& row : sums) {
            for (auto& sum : row) sum = _mm512_setzero_ps();
        }
        for (int pair = 0; pair < pairs; ++pair) {
            __m512i keys[4];
            for (int k = 0; k < 4; ++k) keys[k] = _mm512_load_si512(packed + pair * TILE_KEYS + k * 16);
            for (int n = 0; n < N; ++n) {
                const __m512i q = _mm512_set1_epi32(asked[n * (query.width / 2) + pair]);
                for (int k = 0; k < 4; ++k) sums[n][k] = dot(sums[n][k], q, keys[k]);
            }
        }
        for (int n = 0; n < N; ++n) {
            for (int k = 0; k < 4; ++k)
                _mm512_store_ps(to + (lane + n) * TILE_KEYS + k * 16, sums[n][k]);
        }
    }

    static void pair(int dim, const Cells& cells, const Tile<Element>& tile, const Tile<Element>& next,
                     bool ahead, const Scratch& scratch) {
        for (int d = 0; d < dim; d += CHUNK) {
            for (int key = 0; key < tile.count; key += 2) {
                __m512i vectors[4];
                for (int i = 0; i < CHUNK; i += DIMS) {
                    cells.pairs(tile.values[key] + d + i, tile.values[key + 1] + d + i, dim - d - i,
                                vectors + i / 16);
                    if (ahead && d + i < dim) {
                        fetch_line(next.values[key] + d + i);
                        fetch_line(next.values[key + 1] + d + i);
                    }
                }
                for (int i = 0; i < 4; ++i)
                    _mm512_store_si512(paired_at(scratch, d, key) + 16 * i, vectors[i]);
            }
        }
    }

    // `pairs_at(d, key, to, is_first)` gives CHUNK dims of two keys; the first lanes are the first to ask.
    template <class PairsAt>
    static void add_all(const Sum& sum, int lanes, const PairsAt& pairs_at) {
        int lane = 0;
        for (; lane + LANES <= lanes; lane += LANES) add<LANES>(sum, lane, pairs_at);
        switch (lanes - lane) {
            case 5:
                return add<5>(sum, lane, pairs_at);
            case 4:
                return add<4>(sum, lane, pairs_at);
            case 3:
                return add<3>(sum, lane, pairs_at);
            case 2:
                return add<2>(sum, lane, pairs_at);
            case 1:
                return add<1>(sum, lane, pairs_at);
            default:
                return;
        }
    }

    template <int N, class PairsAt>
    static void add(const Sum& sum, int lane, const PairsAt& pairs_at) {
        const int width = padded(sum.dim);
        const std::int32_t* weights = weights_of(sum.scratch, lane);
        for (int d = 0; d < sum.dim; d += CHUNK) {
            float* out = sum.out + static_cast<std::int64_t>(lane) * width + d;
            __m512 sums[N][4];
            for (int n = 0; n < N; ++n) {
                const __m512 factor = _mm512_set1_ps(sum.fade[lane + n]);
                for (int i = 0; i < 4; ++i)
                    sums[n][i] = _mm512_mul_ps(_mm512_load_ps(out + n * width + 16 * i), factor);
            }
            for (int key = 0; key < sum.tile.count; key += 2) {
                __m512i pairs[4];
                pairs_at(d, key, pairs, lane == 0);
                for (int n = 0; n < N; ++n) {
                    const __m512i weight = _mm512_set1_epi32(weights[n * (TILE_KEYS / 2) + key / 2]);
                    for (int i = 0; i < 4; ++i) sums[n][i] = dot(sums[n][i], weight, pairs[i]);
                }
            }
            for (int n = 0; n < N; ++n) {
                for (int i = 0; i < 4; ++i) _mm512_store_ps(out + n * width + 16 * i, sums[n][i]);
            }
        }
    }
};

}  // namespace
}  // namespace kvspan
