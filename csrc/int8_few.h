// Attention of at most four lanes over int8 by AVX-512's dot products of bytes. Sixteen keys at a time
// are transposed in registers, four dims of each a vector, and multiplied there by words of the queries,
// so that scores come out key by key: neither are keys widened nor sums reduced. The steps of a softmax
// that wait for one another are taken for all lanes together.
//
// A query becomes whole numbers of 24 bits in three terms of 8, as in `Int8Group`. The third term is
// zero but in dims that are 2^-7 of the largest or less, and is multiplied where a group of four dims
// has such a one in any lane.
//
// Keys are multiplied as unsigned, 128 too high; sums begin with what takes that off.
//
// For files compiled for AVX-512-VNNI and VBMI alone. Knows no scales below zero, and keys of one part.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bf16.h"
#include "bf16_wide.h"
#include "flash.h"
#include "int8_group.h"
#include "int8_sum.h"

namespace kvspan {
namespace {

class Int8Few {
public:
    static bool takes(const Attention& call, int lanes) {
        return lanes <= MOST && call.part_dims[1] == 0 && call.head_dim <= MOST_DIMS;
    }

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const int lanes = unit.head_lanes();
        const Asked asked = asked_of(call, lanes, scratch);
        *asked.thirds = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            const Place place = place_of(call, unit, first + lane);
            const Bf16* from = static_cast<const Bf16*>(call.query) +
                               place.row * call.query_row_stride +
                               place.head * call.query_head_stride;
            load_lane(from, call.head_dim, lane, asked);
        }
    }

    // One tile, from its scores to the sums of its values.
    static void take(const Attention& call, const Unit& unit, const Tile<I8>& tile, Ahead<I8>& ahead,
                     const Scratch& scratch, const Partial& partial, Vec* sums) {
        constexpr decltype(&take) LANES[] = {take_lanes<1>, take_lanes<2>, take_lanes<3>, take_lanes<4>};
        LANES[unit.head_lanes() - 1](call, unit, tile, ahead, scratch, partial, sums);
    }

private:
    static constexpr int MOST = 4;         // lanes, so that keys and sums fit in registers
    static constexpr int MOST_DIMS = 256;  // so that groups are the bits of a word
    static constexpr int TERMS = 3, GROUPS = 16;  // of a chunk of dims

    // The queries of a KV head, where g numbers groups of four dims, of whole chunks.
    struct Asked {
        int lanes, groups;
        std::int32_t* words;    // [g][TERMS][lanes]: high terms, low ones, third ones
        std::int32_t* begin;    // [TERMS][lanes]: what sums over them begin with
        float* unit;            // [lanes]: what scores, of high and low ones, are multiplied by
        std::uint64_t* thirds;  // bit g: a third term of that group is not zero
    };

    static Asked asked_of(const Attention& call, int lanes, const Scratch& scratch) {
        const int groups = (call.head_dim + ByteSum::CHUNK - 1) / ByteSum::CHUNK * GROUPS;
        auto* words = reinterpret_cast<std::int32_t*>(scratch.query);
        std::int32_t* begin = words + TERMS * groups * lanes;
        float* unit = reinterpret_cast<float*>(begin + TERMS * MOST);
        return {lanes, groups, words, begin, unit, reinterpret_cast<std::uint64_t*>(unit + MOST)};
    }

    static void load_lane(const Bf16* from, int dims, int lane, const Asked& asked) {
        __m512i largest = _mm512_setzero_si512();  // as bits, of which those of NaN are the largest
        for (int d = 0; d < dims; d += WIDE) {
            const __m512 x = (__m512)load_up_to(from + d, dims - d);
            largest = _mm512_max_epi32(largest, (__m512i)_mm512_abs_ps(x));
        }
        const int most = _mm512_reduce_max_epi32(largest);
        const float unit = Int8Group::unit_of(__builtin_bit_cast(float, most));
        __m512i sums[TERMS] = {};
        for (int g = 0; g < asked.groups; g += 4) {
            __m512i whole = _mm512_setzero_si512();
            if (const int d = 4 * g; d < dims) {
                const __m512 x = (__m512)load_up_to(from + d, dims - d);
                whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(256 / unit)));
            }
            for (int t = TERMS - 1; t >= 0; --t) {
                const __m512i term = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
                whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, term), 8);
                sums[t] = _mm512_add_epi32(sums[t], term);
                alignas(16) std::int32_t words[4];
                _mm_store_si128((__m128i*)words, _mm512_cvtepi32_epi8(term));
                for (int i = 0; i < 4; ++i) {
                    asked.words[((g + i) * TERMS + t) * asked.lanes + lane] = words[i];
                    if (t == 2 && words[i] != 0) *asked.thirds |= 1ull << (g + i);
                }
            }
        }
        for (int t = 0; t < TERMS; ++t)
            asked.begin[t * asked.lanes + lane] = -128 * _mm512_reduce_add_epi32(sums[t]);
        asked.unit[lane] = unit;
    }

    template <int N>
    KVSPAN_APART static void take_lanes(const Attention& call, const Unit& unit, const Tile<I8>& tile,
                                  Ahead<I8>& ahead, const Scratch& scratch, const Partial& partial,
                                  Vec* sums) {
        const Asked asked = asked_of(call, N, scratch);
        std::uint64_t seen[N];
        for (int lane = 0, row = 0; row < unit.rows; ++row) {
            const std::int64_t at = unit.first_row + row;
            const std::uint64_t its = tile.seen & visible(call.first[at], call.last[at], tile.first);
            for (int head = 0; head < unit.heads; ++head) seen[lane++] = its;
        }
        __m512 most[N];
        for (int n = 0; n < N; ++n) most[n] = _mm512_set1_ps(MINUS_INFINITY);
        for (int key = 0; key < TILE_KEYS; key += WIDE) {
            ahead.ask(WIDE);
            score<N>(tile, key, call.head_dim, asked, seen, scratch.scores + key, most);
        }
        float fade[N];
        weigh<N>(call, tile, asked, most, scratch, partial.max, fade, sums);
        ByteSum::run(call, 0, N, tile, ahead, scratch, fade, partial.out);
    }

    // Scores of WIDE keys, times their scales but in units of their queries; hidden where a lane does
    // not see them. Raises `most`, element by element.
    template <int N>
    static KVSPAN_INLINE void score(const Tile<I8>& tile, int key, int dims, const Asked& asked,
                                    const std::uint64_t* seen, float* to, __m512* most) {
        const __m512 nothing = _mm512_set1_ps(MINUS_INFINITY);
        __m512 scores[N];
        if (key < tile.count) {
            multiply<N>(tile, key, dims, asked, scores);
        } else {
            for (auto& score : scores) score = nothing;
        }
        const __m512 scales = _mm512_load_ps(tile.key_scales[0] + key);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const auto here = static_cast<__mmask16>(seen[n] >> key);
            const __m512 score = _mm512_mask_mul_ps(nothing, here, scores[n], scales);
            _mm512_store_ps(to + n * TILE_KEYS, score);
            most[n] = _mm512_max_ps(score, most[n]);
        }
    }

    template <int N>
    static KVSPAN_INLINE void multiply(const Tile<I8>& tile, int key, int dims, const Asked& asked,
                                       __m512 (&scores)[N]) {
        __m512i high[N], low[N], third[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            high[n] = _mm512_set1_epi32(asked.begin[n]);
            low[n] = _mm512_set1_epi32(asked.begin[N + n]);
            third[n] = _mm512_set1_epi32(asked.begin[2 * N + n]);
        }
        std::uint64_t thirds = *asked.thirds;
        const std::int32_t* words = asked.words;
        for (int d = 0; d < dims; d += ByteSum::CHUNK, thirds >>= GROUPS, words += GROUPS * TERMS * N) {
            const __mmask64 there = ByteSum::there(dims - d);
            __m512i rows[WIDE];
#pragma GCC unroll 16
            for (int k = 0; k < WIDE; ++k) {
                const __m512i row = _mm512_maskz_loadu_epi8(there, tile.keys[key + k] + d);
                rows[k] = _mm512_xor_si512(row, _mm512_set1_epi8(-128));
            }
            transpose_fours(rows);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {  // what is transposed next is, meanwhile
                __m512i groups[4];
                gather_quarters(rows[i], rows[i + 4], rows[i + 8], rows[i + 12], groups);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const int g = 4 * j + i;
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) {
                        dot_bytes(high[n], groups[j], words + g * TERMS * N + n);
                        dot_bytes(low[n], groups[j], words + (g * TERMS + 1) * N + n);
                    }
                    if (!(thirds >> g & 1)) continue;
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n)
                        dot_bytes(third[n], groups[j], words + (g * TERMS + 2) * N + n);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[n], 8), low[n]);
            scores[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(third[n]), _mm512_set1_ps(0x1p-8f),
                                        _mm512_cvtepi32_ps(whole));
        }
    }

    // Of each four rows: quarter j of the i-th has their words 4 * j + i.
    static KVSPAN_INLINE void transpose_fours(__m512i (&r)[WIDE]) {
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i += 4) {
            const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            const __m512i b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
            const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
            const __m512i d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
            r[i] = _mm512_unpacklo_epi64(a, c), r[i + 1] = _mm512_unpackhi_epi64(a, c);
            r[i + 2] = _mm512_unpacklo_epi64(b, d), r[i + 3] = _mm512_unpackhi_epi64(b, d);
        }
    }

    // to[j] = quarter j of each of four vectors.
    static KVSPAN_INLINE void gather_quarters(__m512i a, __m512i b, __m512i c, __m512i d,
                                              __m512i (&to)[4]) {
        const __m512i even[2] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(c, d, 0x88)};
        const __m512i odd[2] = {_mm512_shuffle_i32x4(a, b, 0xdd), _mm512_shuffle_i32x4(c, d, 0xdd)};
        to[0] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
        to[1] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        to[2] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        to[3] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }

    // Scores become weights of values, their largest and sums are taken up; `fade[lane]` is what earlier
    // tiles are multiplied by.
    template <int N>
    static KVSPAN_INLINE void weigh(const Attention& call, const Tile<I8>& tile, const Asked& asked,
                                    const __m512* most, const Scratch& scratch, float* max, float* fade,
                                    Vec* sums) {
        __m512 weights[N][4], largest[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) largest[n] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const float scale = call.scale * LOG2_E * asked.unit[n];
            fade[n] = raise((Vec)most[n] * scale, max[n]);
            if (scale != scale) max[n] = scale;  // a query that overflowed is none that sees nothing
            const float anchor = max[n] == MINUS_INFINITY ? 0.0f : max[n];
            __m512 total = _mm512_setzero_ps();
            __m512i greatest = _mm512_setzero_si512();  // as bits, of which those of NaN are the largest
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const __m512 score = _mm512_load_ps(scratch.scores + n * TILE_KEYS + WIDE * v);
                const __m512 x = _mm512_fmsub_ps(score, _mm512_set1_ps(scale), _mm512_set1_ps(anchor));
                const __m512 weight = exp2_of(x);
                total = _mm512_add_ps(total, weight);
                weights[n][v] = _mm512_mul_ps(weight, _mm512_load_ps(tile.value_scales + WIDE * v));
                greatest = _mm512_max_epi32(greatest, (__m512i)weights[n][v]);
            }
            largest[n] = (__m512)greatest;
            sums[n] = sums[n] * fade[n] + (Vec)total;
        }
        const __m512 units = _mm512_mul_ps(largest_of(largest), _mm512_set1_ps(1 / 65535.0f));
        const __m512 least = _mm512_set1_ps(1e-30f / 65535.0f);
        const __m512 inverses = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_max_ps(units, least));
        alignas(64) float unit[WIDE];
        _mm512_store_ps(unit, units);
        put<N, 0>(weights, inverses, unit, scratch.weights);
    }

    // Packs the weights of lanes from `n` on.
    template <int N, int n>
    static KVSPAN_INLINE void put(const __m512 (&weights)[N][4], __m512 inverses, const float* unit,
                                  float* to) {
        ByteWeights::pack(weights[n], _mm512_permute_ps(inverses, n * 0x55), to);
        to[ByteWeights::UNIT_AT] = unit[n];
        if constexpr (n + 1 < N) put<N, n + 1>(weights, inverses, unit, to + TILE_KEYS);
    }

    // Each quarter has the largest elements, as bits, of the four vectors.
    static KVSPAN_INLINE __m512 largest_of(const __m512 (&v)[4]) {
        const auto larger = [](__m512 a, __m512 b) {
            return (__m512)_mm512_max_epi32((__m512i)a, (__m512i)b);
        };
        const __m512 a = larger(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        const __m512 b = larger(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        const __m512 c = larger(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
        const __m512 d = larger(c, _mm512_shuffle_f32x4(c, c, 0xb1));
        return larger(d, _mm512_shuffle_f32x4(d, d, 0x4e));
    }
};

}  // namespace
}  // namespace kvspan
