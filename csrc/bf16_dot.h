// Attention of bf16 queries by AVX-512's dot product of bf16 pairs, which sums in float32, over whatever
// `Cells` turn into bf16.
//
// Scores of few lanes are dot products over a key's dims, sixteen at a time, reduced by one tree of
// shuffles. For more of them lanes become the lanes of vectors (`bf16_wide.h`), unless there are so many
// that transposing the tile of keys, once, is cheaper than transposing its scores. For many lanes values
// are paired first, once. Dims may be in an order that `Cells` likes, from the query to the output, where
// `finish` puts it right.
#pragma once

#include "bf16.h"
#include "bf16_sum.h"
#include "bf16_wide.h"
#include "cells.h"
#include "code_scores.h"
#include "flash.h"
#include "vectors.h"

namespace kvspan {
namespace {

template <class Cells>
struct Bf16Dot {
    using Element = typename Cells::Element;
    static constexpr int DIMS = Cells::DIMS, VECTORS = Cells::VECTORS;
    static constexpr int LANES = 6;          // of a register block, with 4 vectors each
    static constexpr int CHUNK = 64;         // dims of such a block
    static constexpr int PAIRED_LANES = 12;  // from here on values are paired once for all lanes
    static constexpr int WIDE_LANES = 12;    // from here on vectors of lanes pay for copying codes

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        if (is_wide(call, unit.head_lanes())) return load_wide_query(call, unit, first, scratch);
        const bool quartered = by_quarters(call, unit.head_lanes());
        const int copies = quartered ? 4 : 1, width = copies * query_width(call);
        for (int lane = 0; lane < unit.head_lanes(); ++lane) {
            const Place place = place_of(call, unit, first + lane);
            const Bf16* from = static_cast<const Bf16*>(call.query) +
                               place.row * call.query_row_stride +
                               place.head * call.query_head_stride;
            Bf16* to = query_of(scratch, lane, width);
            for (int part = 0; part < MAX_PARTS; from += call.part_dims[part++]) {
                for (int d = 0; d < call.part_dims[part]; d += DIMS, to += copies * DIMS) {
                    __m512i vectors[VECTORS];
                    for (int v = 0; v < VECTORS; ++v)
                        vectors[v] = dims(from + d + 32 * v, call.part_dims[part] - d - 32 * v);
                    if (!quartered) Cells::arrange(vectors);
                    for (int v = 0; v < VECTORS; ++v) {
                        if (quartered) store_quarters(vectors[v], to + 128 * v);
                        if (!quartered) _mm512_store_si512(to + 32 * v, vectors[v]);
                    }
                }
            }
        }
    }

    static void scores(const Attention& call, int lanes, const Tile<Element>& tile,
                       Ahead<Element>& ahead, const Scratch& scratch, const Part& part, float* to) {
        if (is_wide(call, lanes)) {
            const Bf16* room[TILE_KEYS];
            const WideRows rows{key_rows(call, tile, part, scratch, room), tile.count};
            return wide_scores(rows, part.dims, wide_query(call, lanes, part.number, scratch), ahead, to);
        }
        const Query query{query_of(scratch, 0, 0) + (part.number ? whole(call.part_dims[0]) : 0),
                          query_width(call)};
        if constexpr (IS_CODE<Element>) {
            if (by_quarters(call, lanes))
                return CodeScores<Cells>::run(lanes, tile, ahead, quartered(call, scratch, part), part, to);
        }
        // A reduction costs about 3 instructions a lane and key, a transposition 0.2 a dim and key.
        if (lanes * 16 <= call.head_dim + 16) return few_lanes(lanes, tile, ahead, query, part, to);
        transpose(tile, ahead, scratch, part);
        int lane = 0;
        const int pairs = whole(part.dims) / 2;
        for (; lane + LANES <= lanes; lane += LANES) many_lanes<LANES>(pairs, lane, query, scratch, to);
        for (; lane + 2 <= lanes; lane += 2) many_lanes<2>(pairs, lane, query, scratch, to);
        for (; lane < lanes; ++lane) many_lanes<1>(pairs, lane, query, scratch, to);
    }

    static Vec weigh(const Tile<Element>& tile, const Scratch& scratch, int lane, float scale, float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        auto* weights = weights_of(scratch, lane);
        const __m512 scales = _mm512_set1_ps(scale), anchor = _mm512_set1_ps(max);
        __m512 total = _mm512_setzero_ps();
        for (int i = 0; i < TILE_KEYS; i += 32) {
            __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + i), scales, anchor));
            __m512 high = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + i + 16), scales, anchor));
            total = _mm512_add_ps(total, _mm512_add_ps(low, high));
            if constexpr (IS_CODE<Element>) {
                low = _mm512_mul_ps(low, _mm512_load_ps(tile.value_scales + i));
                high = _mm512_mul_ps(high, _mm512_load_ps(tile.value_scales + i + 16));
            }
            _mm512_store_si512(weights + i / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
        return (Vec)total;
    }

    static void accumulate(const Attention& call, int lanes, const Tile<Element>& tile,
                           Ahead<Element>& ahead, const Scratch& scratch, const float* fade, float* out) {
        const Cells cells;
        const WeightedSum sum{call.value_dim, tile.count, weights_of(scratch, 0), fade, out};
        if (keeps_order(call, lanes)) {
            const Bf16* room[TILE_KEYS];
            const Bf16* const* rows = value_rows(call, tile, scratch, room);
            const auto in_order = [rows, dim = call.value_dim](int d) {
                return [rows, d, dim](int key, auto& to) __attribute__((always_inline)) {
                    for (int i = 0; i < static_cast<int>(sizeof to / 4); i += 32) {
                        const int at = d + i;
                        Bf16Cells().pairs(rows[key] + at, rows[key + 1] + at, dim - at, to + i / 16);
                    }
                };
            };
            return add_wide(sum, lanes, ahead, in_order);
        }
        if (lanes >= PAIRED_LANES) {
            pair(call.value_dim, cells, tile, ahead, scratch);
            const auto paired = [&](int d) {
                return [&scratch, d](int key, auto& to) __attribute__((always_inline)) {
                    for (int i = 0; i < 4; ++i)
                        to[i] = _mm512_load_si512(paired_at(scratch, d, key) + 16 * i);
                };
            };
            return add_all(sum, 0, lanes, ahead, paired);
        }
        const auto in_place = [&](int d) {
            return [&, d](int key, auto& to) __attribute__((always_inline)) {
                for (int i = 0; i < CHUNK; i += DIMS) {
                    const int at = d + i;
                    const Element *even = tile.values[key] + at, *odd = tile.values[key + 1] + at;
                    cells.pairs(even, odd, call.value_dim - at, to + i / 16);
                }
            };
        };
        // Tables that widen codes leave registers for no more than 4 lanes.
        if constexpr (IS_CODE<Element>) return add_all<4>(sum, 0, lanes, ahead, in_place);
        add_all(sum, 0, lanes, ahead, in_place);
    }

    static void finish(const Attention& call, const Unit& unit, float* out) {
        const std::int64_t size = static_cast<std::int64_t>(unit.lanes()) * padded(call.value_dim);
        if (keeps_order(call, unit.head_lanes())) {
            for (std::int64_t i = 0; i < size; i += Bf16Cells::DIMS) Bf16Cells::restore(out + i);
        } else {
            for (std::int64_t i = 0; i < size; i += DIMS) Cells::restore(out + i);
        }
    }

private:
    // The query's vectors of one part, lane by lane.
    struct Query {
        const Bf16* data;
        int width;

        const Bf16* of(int lane) const { return data + static_cast<std::int64_t>(lane) * width; }
    };

    // Whether transposing scores, 4 shuffles a lane for 16 keys, costs less than keys, 2 a dim.
    static bool is_wide(const Attention& call, int lanes) {
        const bool fits = query_width(call) <= padded(call.head_dim) && call.part_dims[0] % 4 == 0;
        return lanes >= least_wide(call) && 2 * lanes <= call.head_dim && fits;
    }

    // From here on vectors of lanes are full enough: sums over few dims cost less than to reduce them.
    static int least_wide(const Attention& call) {
        if constexpr (IS_CODE<Element>) return WIDE_LANES;
        return call.head_dim <= 64 ? 5 : 7;
    }

    static QuarteredQuery quartered(const Attention& call, const Scratch& scratch, const Part& part) {
        const int skipped = part.number ? 4 * whole(call.part_dims[0]) : 0;
        return {query_of(scratch, 0, 0) + skipped, 4 * query_width(call)};
    }

    // Whether sums are so short that reducing them costs as much as they do. Longer ones are better made of
    // whole rows, which memory delivers faster than quarters of many.
    static bool by_quarters(const Attention& call, int lanes) {
        return IS_CODE<Element> && call.head_dim <= 64 && lanes < WIDE_LANES;
    }

    // Whether values are paired in registers, from rows of bf16 in their own order.
    static bool keeps_order(const Attention& call, int lanes) {
        return is_wide(call, lanes) && lanes <= 2 * WIDE_BLOCK;
    }

    static WideQuery wide_query(const Attention& call, int lanes, int part, const Scratch& scratch) {
        const auto* words = reinterpret_cast<const std::int32_t*>(scratch.query);
        const int first = part ? call.part_dims[0] / 2 : 0;
        return {words + static_cast<std::int64_t>(first) * WideQuery::stride_of(lanes), lanes};
    }

    static void load_wide_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const int lanes = unit.head_lanes();
        auto* words = reinterpret_cast<std::int32_t*>(scratch.query);
        for (int lane = 0; lane < WideQuery::stride_of(lanes); ++lane) {
            const Place place = place_of(call, unit, first + (lane < lanes ? lane : 0));
            const Bf16* from = static_cast<const Bf16*>(call.query) +
                               place.row * call.query_row_stride +
                               place.head * call.query_head_stride;
            for (int pair = 0; pair < call.head_dim / 2; ++pair)
                words[WideQuery::at(pair, lane, lanes)] = word_at(from + 2 * pair);
        }
    }

    // A tile's keys as rows of bf16, from a part's first dim on: those of the cache, or copies of codes.
    static const Bf16* const* key_rows(const Attention& call, const Tile<Element>& tile, const Part& part,
                                       const Scratch& scratch, const Bf16* (&room)[TILE_KEYS]) {
        if constexpr (!IS_CODE<Element>) {
            return tile.keys;
        } else {
            Bf16* to = reinterpret_cast<Bf16*>(scratch.packed) + (part.number ? whole(call.part_dims[0]) : 0);
            return widened_rows(tile.keys, part, tile.count, to, query_width(call), room);
        }
    }

    static const Bf16* const* value_rows(const Attention& call, const Tile<Element>& tile,
                                         const Scratch& scratch, const Bf16* (&room)[TILE_KEYS]) {
        if constexpr (!IS_CODE<Element>) {
            return tile.values;
        } else if (tile.values[0] == tile.keys[0] && call.value_dim <= call.part_dims[0]) {
            for (int key = 0; key < TILE_KEYS; ++key)
                room[key] = reinterpret_cast<const Bf16*>(scratch.packed) + key * query_width(call);
            return room;
        } else {
            return widened_rows(tile.values, Part{0, 0, call.value_dim}, tile.count,
                                reinterpret_cast<Bf16*>(scratch.paired), padded(call.value_dim), room);
        }
    }

    // Some dims of codes as rows of bf16, `width` apart.
    static const Bf16* const* widened_rows(const Element* const* from, const Part& part, int count, Bf16* to,
                                           int width, const Bf16* (&rows)[TILE_KEYS]) {
        const Cells cells;
        for (int key = 0; key < TILE_KEYS; ++key) {
            rows[key] = to + key * width;
            for (int d = 0; key < (count + 7) / 8 * 8 && d < part.dims; d += DIMS) {
                __m512i vectors[VECTORS];
                cells.load(from[key] + part.first + d, part.dims - d, vectors);
                Cells::put_in_order(vectors);
                for (int v = 0; v < VECTORS; ++v)
                    _mm512_store_si512(to + key * width + d + 32 * v, vectors[v]);
            }
        }
        return rows;
    }

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

    static void few_lanes(int lanes, const Tile<Element>& tile, Ahead<Element>& ahead,
                          const Query& query, const Part& part, float* to) {
        int lane = 0;
        for (; lane + 4 <= lanes; lane += 4) dots<4, 4>(lane, tile, ahead, query, part, to);
        switch (lanes - lane) {
            case 3:
                return dots<3, 4>(lane, tile, ahead, query, part, to);
            case 2:
                return dots<2, 8>(lane, tile, ahead, query, part, to);
            case 1:
                return dots<1, 16>(lane, tile, ahead, query, part, to);
            default:
                return;
        }
    }

    template <int N, int KEYS>
    static void dots(int lane, const Tile<Element>& tile, Ahead<Element>& ahead, const Query& query,
                     const Part& part, float* to) {
        const Cells cells;
        const Bf16* queries = query.of(lane);
        const int width = query.width, whole_dims = part.dims / DIMS * DIMS;
        Ahead<Element> asking = ahead;
        for (int key = 0; key < tile.count; key += KEYS) {
            __m512 sums[16];
            for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
            asking.ask(KEYS);
            const auto add = [&](int d, int left) __attribute__((always_inline)) {
                __m512i asked[N][VECTORS];
                for (int n = 0; n < N; ++n) {
                    for (int v = 0; v < VECTORS; ++v)
                        asked[n][v] = _mm512_load_si512(queries + n * width + d + 32 * v);
                }
                for (int k = 0; k < KEYS; ++k) {
                    __m512i vectors[VECTORS];
                    cells.load(tile.keys[key + k] + part.first + d, left, vectors);
                    for (int v = 0; v < VECTORS; ++v) {
                        for (int n = 0; n < N; ++n)
                            sums[n * KEYS + k] = dot(sums[n * KEYS + k], asked[n][v], vectors[v]);
                    }
                }
            };
            for (int d = 0; d < whole_dims; d += DIMS) add(d, DIMS);
            if (whole_dims < part.dims) add(whole_dims, part.dims - whole_dims);
            alignas(64) float scores[16];
            _mm512_store_ps(scores, reduce(sums));
            for (int n = 0; n < N; ++n)
                __builtin_memcpy(to + (lane + n) * TILE_KEYS + key, scores + n * KEYS, KEYS * 4);
        }
        ahead = asking;
    }

    // packed[d / 2][key] = dims d and d + 1 of each key.
    static void transpose(const Tile<Element>& tile, Ahead<Element>& ahead, const Scratch& scratch,
                          const Part& part) {
        const Cells cells;
        auto* packed = reinterpret_cast<std::int32_t*>(scratch.packed);
        for (int key = 0; key < tile.count; key += 16) {
            for (int d = 0; d < part.dims; d += DIMS) {
                __m512i rows[VECTORS][16];
                ahead.ask(4);
                for (int k = 0; k < 16; ++k) {
                    __m512i vectors[VECTORS];
                    cells.load(tile.keys[key + k] + part.first + d, part.dims - d, vectors);
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

    template <int N>
    KVSPAN_APART static void many_lanes(int pairs, int lane, const Query& query, const Scratch& scratch,
                                        float* to) {
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

    static void pair(int dim, const Cells& cells, const Tile<Element>& tile, Ahead<Element>& ahead,
                     const Scratch& scratch) {
        for (int d = 0; d < dim; d += CHUNK) {
            for (int key = 0; key < tile.count; key += 2) {
                __m512i vectors[4];
                ahead.ask(1);
                for (int i = 0; i < CHUNK; i += DIMS) {
                    cells.pairs(tile.values[key] + d + i, tile.values[key + 1] + d + i, dim - d - i,
                                vectors + i / 16);
                }
                for (int i = 0; i < 4; ++i)
                    _mm512_store_si512(paired_at(scratch, d, key) + 16 * i, vectors[i]);
            }
        }
    }
};

}  // namespace
}  // namespace kvspan
