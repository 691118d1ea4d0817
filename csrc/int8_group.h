// Scores and weights of some lanes over int8 by AVX-512's dot products of bytes. A tile's keys are transposed
// once for all lanes, four dims of sixteen keys a vector, so that scores come out key by key and need not be
// reduced, and what is done once a tile and lane is done for all lanes together.
//
// A query becomes whole numbers of 24 bits, of which the largest fills them, in three terms of 8 bits. A bf16
// has 8 bits that count, so the third term is zero but in dims that are 2^-7 of the largest or less: of each
// lane those groups of dims are listed, and multiplied alone. That is as exact as float32.
//
// Keys are multiplied as unsigned, 128 too high; sums begin with what takes that off. Weights of values are what
// `Int8Dot` makes of them.
//
// For files compiled for AVX-512-VNNI and VBMI alone. Knows no scales below zero, and keys of one part.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bf16.h"
#include "bf16_wide.h"
#include "flash.h"
#include "group_softmax.h"
#include "int8_sum.h"

namespace kvspan {
namespace {

class Int8Group {
public:
    static bool takes(const Attention& call, int lanes) {
        return lanes >= LEAST && lanes <= WIDE && call.part_dims[1] == 0 && call.head_dim <= MOST_DIMS;
    }

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const int lanes = unit.head_lanes();
        const Asked asked = asked_of(call, lanes, scratch);
        *asked.num_rest = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            const Place place = place_of(call, unit, first + lane);
            const Bf16* from = static_cast<const Bf16*>(call.query) + place.row * call.query_row_stride +
                               place.head * call.query_head_stride;
            load_lane(from, call.head_dim, lane, asked);
        }
    }

    // One tile, from its scores to the sums of its values.
    static void take(const Attention& call, const Unit& unit, const Tile<I8>& tile, Ahead<I8>& ahead,
                     const Scratch& scratch, const Partial& partial, Vec* sums) {
        const int lanes = unit.head_lanes();
        const Asked asked = asked_of(call, lanes, scratch);
        for (int key = 0; key < tile.count; key += WIDE) {
            ahead.ask(WIDE);
            transpose(tile, key, call.head_dim, packed_at(scratch, asked, key));
            for (int lane = 0; lane < lanes; lane += BLOCK)
                score(lanes - lane, asked, lane, packed_at(scratch, asked, key), scratch.scores + key);
        }
        for (int i = 0; i < *asked.num_rest; ++i) add_rest(asked.rest[i], scratch, asked);
        alignas(64) float most[WIDE][WIDE], fade[WIDE], anchor[WIDE], scales[WIDE];
        settle_group(call, unit, tile, scratch, most);
        const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(asked.unit), _mm512_set1_ps(call.scale * LOG2_E));
        _mm512_store_ps(scales, scale);
        raise_group(lanes, scale, most, partial.max, fade, anchor);
        for (int lane = 0; lane < lanes; lane += SUMMED) {
            const int here = lanes - lane < SUMMED ? lanes - lane : SUMMED;
            for (int i = lane; i < lane + here; ++i)
                sums[i] = sums[i] * fade[i] + weigh(tile, i, scales[i], anchor[i], scratch);
            ByteSum::run(call, lane, here, tile, ahead, scratch, fade, partial.out);
        }
    }

private:
    friend class Int8Few;  // which splits queries in the same units

    static constexpr int LEAST = 5;        // fewer are `Int8Few`'s
    static constexpr int MOST_DIMS = 512;  // whose sums are below 2^31
    static constexpr int BLOCK = 8;        // lanes whose scores are summed together, and
    static constexpr int SUMMED = 3;       // whose values are

    // Four dims of a lane's third terms.
    struct Rest {
        std::int32_t lane, group, word, begin;
    };

    // The queries of a KV head, where g numbers groups of four dims.
    struct Asked {
        int lanes, groups;
        std::int32_t* words;  // [g][lanes][2]: high terms and low ones
        std::int32_t* begin;  // [lanes][2]: what sums over them begin with
        float* unit;          // [WIDE]: what scores, of both, are multiplied by
        int* num_rest;
        Rest* rest;  // that are not zero
    };

    static Asked asked_of(const Attention& call, int lanes, const Scratch& scratch) {
        auto* words = reinterpret_cast<std::int32_t*>(scratch.query);
        const int groups = (call.head_dim + 3) / 4;
        std::int32_t* rest = words + 2 * lanes * groups;
        std::int32_t* begin = rest + 4 * lanes * groups;
        float* unit = reinterpret_cast<float*>(begin + 2 * WIDE);
        return {lanes, groups, words, begin, unit, begin + 3 * WIDE, reinterpret_cast<Rest*>(rest)};
    }

    static std::int32_t* packed_at(const Scratch& scratch, const Asked& asked, int key) {
        return reinterpret_cast<std::int32_t*>(scratch.packed) + key * ((asked.groups + 15) / 16 * 16);
    }

    static void load_lane(const Bf16* from, int dims, int lane, const Asked& asked) {
        __m512i largest = _mm512_setzero_si512();  // as bits, of which those of NaN are the largest
        for (int d = 0; d < dims; d += WIDE) {
            const __m512 x = (__m512)load_up_to(from + d, dims - d);
            largest = _mm512_max_epi32(largest, (__m512i)_mm512_abs_ps(x));
        }
        const float unit = unit_of(__builtin_bit_cast(float, _mm512_reduce_max_epi32(largest)));
        __m512i sums[2] = {};
        for (int d = 0; d < dims; d += WIDE) {
            const __m512 x = (__m512)load_up_to(from + d, dims - d);
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(256 / unit)));
            alignas(16) std::int32_t words[3][4];
            for (int t = 2; t >= 0; --t) {
                const __m512i term = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
                whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, term), 8);
                if (t < 2) sums[t] = _mm512_add_epi32(sums[t], term);
                _mm_store_si128((__m128i*)words[t], _mm512_cvtepi32_epi8(term));
            }
            for (int i = 0, g = d / 4; i < 4 && g < asked.groups; ++i, ++g) {
                for (int t = 0; t < 2; ++t) asked.words[(g * asked.lanes + lane) * 2 + t] = words[t][i];
                if (words[2][i] != 0)
                    asked.rest[(*asked.num_rest)++] = rest_of(lane, g, words[2][i]);
            }
        }
        for (int t = 0; t < 2; ++t) asked.begin[lane * 2 + t] = -128 * _mm512_reduce_add_epi32(sums[t]);
        asked.unit[lane] = unit;
    }

    static Rest rest_of(int lane, int group, std::int32_t word) {
        std::int8_t bytes[4];
        __builtin_memcpy(bytes, &word, sizeof word);
        return {lane, group, word, -128 * (bytes[0] + bytes[1] + bytes[2] + bytes[3])};
    }

    // A power of two in which the largest element has 15 bits before the point, or is not a number.
    static float unit_of(float largest) {
        if (!(largest <= 3.4e38f)) return __builtin_nanf("");
        if (largest < 0x1p-100f) return 0x1p-114f;
        const auto bits = __builtin_bit_cast(std::uint32_t, largest) & 0x7f800000u;
        const float unit = __builtin_bit_cast(float, bits - (14u << 23));
        return largest <= 32639 * unit ? unit : 2 * unit;  // else the high term is too large
    }

    // packed[g][key] = four dims of each of WIDE keys, 128 higher.
    static void transpose(const Tile<I8>& tile, int key, int dims, std::int32_t* packed) {
        for (int d = 0; d < dims; d += ByteSum::CHUNK, packed += WIDE * WIDE) {
            const __mmask64 there = ByteSum::there(dims - d);
            __m512i rows[WIDE];
            for (int k = 0; k < WIDE; ++k) {
                const __m512i row = _mm512_maskz_loadu_epi8(there, tile.keys[key + k] + d);
                rows[k] = _mm512_xor_si512(row, _mm512_set1_epi8(-128));
            }
            transpose_words(rows);
            for (int g = 0; g < WIDE; ++g) _mm512_store_si512(packed + g * WIDE, rows[g]);
        }
    }

    // Scores of WIDE keys and at most BLOCK lanes from `lane` on, in units of their queries and keys.
    static void score(int lanes, const Asked& asked, int lane, const std::int32_t* packed, float* to) {
        using Words = const std::int32_t*;
        using Block = void (*)(Words, Words, Words, int, int, float*);
        constexpr Block BLOCKS[] = {block<1>, block<2>, block<3>, block<4>,
                                    block<5>, block<6>, block<7>, block<8>};
        BLOCKS[(lanes < BLOCK ? lanes : BLOCK) - 1](packed, asked.words + 2 * lane, asked.begin + 2 * lane,
                                                    asked.groups, 2 * asked.lanes, to + lane * TILE_KEYS);
    }

    template <int N>
    KVSPAN_APART static void block(const std::int32_t* keys, const std::int32_t* words,
                                   const std::int32_t* begin, int groups, int stride, float* to) {
        __m512i high[N], low[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            high[n] = _mm512_set1_epi32(begin[2 * n]);
            low[n] = _mm512_set1_epi32(begin[2 * n + 1]);
        }
        for (const auto* end = keys + groups * WIDE; keys < end; keys += WIDE, words += stride) {
            const __m512i k = _mm512_load_si512(keys);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                dot_bytes(high[n], k, words + 2 * n);
                dot_bytes(low[n], k, words + 2 * n + 1);
            }
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[n], 8), low[n]);
            _mm512_store_ps(to + n * TILE_KEYS, _mm512_cvtepi32_ps(whole));
        }
    }

    static void add_rest(const Rest& rest, const Scratch& scratch, const Asked& asked) {
        float* to = scratch.scores + rest.lane * TILE_KEYS;
        for (int key = 0; key < TILE_KEYS; key += WIDE) {
            __m512i sum = _mm512_set1_epi32(rest.begin);
            const std::int32_t* packed = packed_at(scratch, asked, key) + rest.group * WIDE;
            dot_bytes(sum, _mm512_load_si512(packed), &rest.word);
            const __m512 more = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(0x1p-8f));
            _mm512_store_ps(to + key, _mm512_add_ps(_mm512_load_ps(to + key), more));
        }
    }

    static KVSPAN_INLINE Vec weigh(const Tile<I8>& tile, int lane, float scale, float anchor,
                                   const Scratch& scratch) {
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
        ByteWeights::put(weights, 1.0f, scratch.weights + lane * TILE_KEYS);
        return (Vec)total;
    }
};

}  // namespace
}  // namespace kvspan
