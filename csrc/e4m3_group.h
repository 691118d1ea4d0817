// Attention of bf16 queries over e4m3: of 5 to 16 lanes a KV head as follows, of others as `Bf16Dot` does it.
//
// A tile's codes are transposed once for all lanes, four dims of sixteen keys a vector, and become bf16 on the
// way to their products, on units that products leave idle. So do values, which each block of lanes looks up
// again. Scores come out key by key and need not be reduced.
//
// For files compiled for AVX-512-BF16 and VBMI alone. Knows keys of one part, and dims by fours.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bf16.h"
#include "bf16_dot.h"
#include "bf16_sum.h"
#include "bf16_wide.h"
#include "cells.h"
#include "flash.h"
#include "group_softmax.h"

namespace kvspan {
namespace {

class E4m3Group {
public:
    using Cells = CodeCells<E4m3>;

    static bool takes(const Attention& call, int lanes) {
        return lanes >= LEAST && lanes <= WIDE && call.part_dims[1] == 0;
    }

    // Queries as words[group][lane], of four dims each.
    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const int lanes = unit.head_lanes(), dims = call.head_dim;
        for (int lane = 0; lane < lanes; ++lane) {
            const Place place = place_of(call, unit, first + lane);
            const Bf16* from = static_cast<const Bf16*>(call.query) + place.row * call.query_row_stride +
                               place.head * call.query_head_stride;
            for (int d = 0; d < dims; d += 4)
                __builtin_memcpy(words_of(scratch) + d / 4 * lanes + lane, from + d, 4 * sizeof(Bf16));
        }
    }

    // One tile, from its scores to the sums of its values.
    static void take(const Attention& call, const Unit& unit, const Tile<E4m3>& tile, Ahead<E4m3>& ahead,
                     const Scratch& scratch, const Partial& partial, Vec* sums) {
        const int lanes = unit.head_lanes(), groups = call.head_dim / 4;
        const int blocks = (lanes + BLOCK - 1) / BLOCK, most_lanes = (lanes + blocks - 1) / blocks;
        for (int key = 0; key < tile.count; key += WIDE) {
            ahead.ask(WIDE);
            transpose(tile, key, call.head_dim, scratch);
            for (int lane = 0; lane < lanes; lane += most_lanes) {
                const int here = lanes - lane < most_lanes ? lanes - lane : most_lanes;
                score(here, scratch, lane, groups, lanes, scratch.scores + lane * TILE_KEYS + key);
            }
        }
        alignas(64) float most[WIDE][WIDE], fade[WIDE], anchor[WIDE];
        settle_group(call, unit, tile, scratch, most);
        const float scale = call.scale * LOG2_E;
        raise_group(lanes, _mm512_set1_ps(scale), most, partial.max, fade, anchor);
        for (int lane = 0; lane < lanes; ++lane)
            sums[lane] = sums[lane] * fade[lane] + weigh(tile, scratch, lane, scale, anchor[lane]);
        const WeightedSum sum{call.value_dim, tile.count, weights_of(scratch, 0), fade, partial.out};
        for (int lane = 0; lane < lanes; lane += most_lanes)
            accumulate(lanes - lane < most_lanes ? lanes - lane : most_lanes, tile, sum, lane, ahead);
    }

private:
    static constexpr int LEAST = 5;
    static constexpr int BLOCK = 8;  // lanes

    static long long* words_of(const Scratch& scratch) { return reinterpret_cast<long long*>(scratch.query); }

    static std::int32_t* weights_of(const Scratch& scratch, int lane) {
        return reinterpret_cast<std::int32_t*>(scratch.weights) + lane * (TILE_KEYS / 2);
    }

    // scratch.packed[group][key] = four dims of each of WIDE keys.
    static void transpose(const Tile<E4m3>& tile, int key, int dims, const Scratch& scratch) {
        auto* packed = reinterpret_cast<std::int32_t*>(scratch.packed);
        for (int d = 0; d < dims; d += Cells::DIMS, packed += WIDE * WIDE) {
            const int left = dims - d;
            const __mmask64 there = left >= Cells::DIMS ? ~0ull : (1ull << left) - 1;
            __m512i rows[WIDE];
            for (int k = 0; k < WIDE; ++k) rows[k] = _mm512_maskz_loadu_epi8(there, tile.keys[key + k] + d);
            transpose_words(rows);
            for (int g = 0; g < WIDE; ++g) _mm512_store_si512(packed + g * WIDE, rows[g]);
        }
    }

    // Scores of WIDE keys and at most BLOCK lanes from `lane` on, in units of their keys.
    static void score(int here, const Scratch& scratch, int lane, int groups, int lanes, float* to) {
        using Block = void (*)(const std::int32_t*, const long long*, int, int, float*);
        constexpr Block BLOCKS[] = {block<4>, block<5>, block<6>, block<7>, block<8>};
        const auto* packed = reinterpret_cast<const std::int32_t*>(scratch.packed);
        BLOCKS[here - 4](packed, words_of(scratch) + lane, groups, lanes, to);
    }

    // A key's two pairs of dims are two sums, added in the end.
    template <int N>
    KVSPAN_APART static void block(const std::int32_t* keys, const long long* asked, int groups, int stride,
                                   float* to) {
        const Cells cells;
        __m512 sums[N][2];
#pragma GCC unroll 16
        for (int i = 0; i < 2 * N; ++i) sums[i / 2][i % 2] = _mm512_setzero_ps();
        for (const auto* end = keys + groups * WIDE; keys < end; keys += WIDE, asked += stride) {
            __m512i wide[2];
            cells.widen(_mm512_load_si512(keys), wide);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                const __m512i q = _mm512_set1_epi64(asked[n]);
                for (int i = 0; i < 2; ++i) sums[n][i] = dot(sums[n][i], wide[i], q);
            }
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const __m512 even = _mm512_shuffle_ps(sums[n][0], sums[n][1], 0x88);
            const __m512 odd = _mm512_shuffle_ps(sums[n][0], sums[n][1], 0xdd);
            _mm512_store_ps(to + n * TILE_KEYS, _mm512_add_ps(even, odd));
        }
    }

    static KVSPAN_INLINE Vec weigh(const Tile<E4m3>& tile, const Scratch& scratch, int lane, float scale,
                                   float anchor) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        __m512 weights[4], total = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
            const __m512 below = _mm512_fmsub_ps(_mm512_load_ps(scores + WIDE * v), _mm512_set1_ps(scale),
                                                 _mm512_set1_ps(anchor));
            const __m512 weight = exp2_of(below);
            total = _mm512_add_ps(total, weight);
            weights[v] = _mm512_mul_ps(weight, _mm512_load_ps(tile.value_scales + WIDE * v));
        }
        for (int v = 0; v < 4; v += 2) {
            const auto pairs = (__m512i)_mm512_cvtne2ps_pbh(weights[v + 1], weights[v]);
            _mm512_store_si512(weights_of(scratch, lane) + WIDE / 2 * v, pairs);
        }
        return (Vec)total;
    }

    static void accumulate(int here, const Tile<E4m3>& tile, const WeightedSum& sum, int lane,
                           Ahead<E4m3>& ahead) {
        using Add = void (*)(const Tile<E4m3>&, const WeightedSum&, int, Ahead<E4m3>&);
        constexpr Add ADDS[] = {add<4>, add<5>, add<6>, add<7>, add<8>};
        ADDS[here - 4](tile, sum, lane, ahead);
    }

    template <int N>
    KVSPAN_APART static void add(const Tile<E4m3>& tile, const WeightedSum& sum, int lane,
                                 Ahead<E4m3>& ahead) {
        const Cells cells;
        Ahead<E4m3> asking = ahead;
        for (int d = 0; d < sum.dim; d += Cells::DIMS) {
            const int second = d + Cells::DIMS / 2;
            add_block<N, 2, Asks::rows>(sum, lane, d, asking, pairs_at<0>(tile, cells, sum.dim));
            add_block<N, 2, Asks::rows>(sum, lane, second, asking, pairs_at<1>(tile, cells, sum.dim));
        }
        ahead = asking;
    }

    // Half of what `Cells::pairs` gives.
    template <int HALF>
    static KVSPAN_INLINE auto pairs_at(const Tile<E4m3>& tile, const Cells& cells, int dim) {
        return [&tile, &cells, dim](int d) __attribute__((always_inline)) {
            const int at = d / Cells::DIMS * Cells::DIMS, left = dim - at;
            const __mmask64 there = left >= Cells::DIMS ? ~0ull : (1ull << left) - 1;
            return [&tile, &cells, at, there](int key, __m512i (&to)[2]) __attribute__((always_inline)) {
                const __m512i even = _mm512_maskz_loadu_epi8(there, tile.values[key] + at);
                const __m512i odd = _mm512_maskz_loadu_epi8(there, tile.values[key + 1] + at);
                const bool low = HALF == 0;
                cells.widen(low ? _mm512_unpacklo_epi8(even, odd) : _mm512_unpackhi_epi8(even, odd), to);
            };
        };
    }
};

class E4m3Dot : public Bf16Dot<CodeCells<E4m3>> {
public:
    using Group = E4m3Group;

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const auto load = Group::takes(call, unit.head_lanes()) ? Group::load_query : Bf16Dot::load_query;
        load(call, unit, first, scratch);
    }

    static void finish(const Attention& call, const Unit& unit, float* out) {
        if (!Group::takes(call, unit.head_lanes())) return Bf16Dot::finish(call, unit, out);
        const std::int64_t size = static_cast<std::int64_t>(unit.lanes()) * padded(call.value_dim);
        for (std::int64_t i = 0; i < size; i += Group::Cells::DIMS) Group::Cells::restore(out + i);
    }
};

}  // namespace
}  // namespace kvspan
