// Attention of many rows of bf16 over the same keys, as prompts have it, by AVX-512's dot products of bf16
// pairs. Rows and heads of the query are the lanes of vectors, from the scores to the weighted sums: a
// word of a key or of a pair of values is broadcast to all of them, the largest score and the sum of a lane
// are kept in its place of a vector, and nothing is turned or added up across a vector but the output,
// once. For files compiled for AVX-512-BF16 alone.
//
// Lanes come in groups of up to three vectors. A group looks only at those keys of a tile that one of its
// lanes sees, so that of a tile on the diagonal little more than half is computed.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bf16.h"
#include "bf16_wide.h"
#include "cells.h"
#include "flash.h"

namespace kvspan {
namespace {

class Bf16Many {
public:
    // Whether lanes are so many, and keys shared by so many rows, that this is the faster way. A vector costs the
    // same however few of its lanes are used, so most have to be.
    static bool pays(const Unit& unit) {
        const int lanes = unit.head_lanes();
        return unit.rows >= LEAST_ROWS && lanes >= LEAST_LANES && 6 * lanes >= 5 * wide_lanes(lanes);
    }

    static void attend(const Attention& call, const Unit& unit, const Scratch& scratch,
                       const Partial& partial) {
        for (int head = 0; head < unit.kv_heads; ++head) {
            Unit one = unit;
            one.first_kv_head = unit.first_kv_head + head;
            one.first_head = unit.first_head + head * call.group();
            one.kv_heads = 1;
            Bf16Many(call, one, scratch).run(partial_of(call, unit, head, partial));
        }
    }

private:
    static constexpr int LEAST_ROWS = 8, LEAST_LANES = 24;
    static constexpr int GROUP = 3;                    // vectors of lanes at the most
    static constexpr int MOST = MOST_LANES / WIDE;     // vectors of a unit
    static constexpr int KEYS = 8, DIMS = 8;           // of a register block, times a group's vectors
    static constexpr int NOTHING = -0x40000000;        // the place of a key that nobody has

    // Some vectors of lanes, and which keys they see, counted from the unit's first tile on.
    struct Lanes {
        int first, vectors;
        int begin, end;           // one of them sees a key of these
        int all_begin, all_end;   // all of them see all of these

        bool see_all(int key) const { return all_begin <= key && key + TILE_KEYS <= all_end; }
    };

    Bf16Many(const Attention& call, const Unit& unit, const Scratch& scratch)
        : call_(call), unit_(unit), start_(unit.first_key / TILE_KEYS * TILE_KEYS),
          stride_(wide_lanes(unit.head_lanes())), query_(reinterpret_cast<std::int32_t*>(scratch.query)),
          paired_(reinterpret_cast<std::int32_t*>(scratch.paired)), sums_(scratch.sums) {}

    void run(const Partial& partial) {
        load_query();
        find_keys();
        find_groups();
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(stride_) * call_.value_dim; ++i) sums_[i] = 0;
        for (int lane = 0; lane < stride_; ++lane) max_[lane] = MINUS_INFINITY, sum_[lane] = 0.0f;
        Tile<Bf16> tiles[2];
        int turn = 0;
        if (start_ < unit_.last_key) locate(call_, unit_, start_, tiles[0]);
        for (std::int64_t key = start_; key < unit_.last_key; key += TILE_KEYS, turn ^= 1) {
            Tile<Bf16>& next = tiles[turn ^ 1];
            next.seen = 0;
            if (key + TILE_KEYS < unit_.last_key) locate(call_, unit_, key + TILE_KEYS, next);
            if (tiles[turn].seen != 0) take(tiles[turn], next);
        }
        put(partial);
    }

    // Queries by pairs of dims, [pairs, stride_] words; lanes that are too many repeat the first.
    void load_query() {
        const int lanes = unit_.head_lanes(), pairs = call_.head_dim / 2;
        for (int lane = 0; lane < stride_; lane += WIDE) {
            const Bf16* from[WIDE];
            for (int i = 0; i < WIDE; ++i) {
                const Place place = place_of(call_, unit_, lane + i < lanes ? lane + i : 0);
                from[i] = static_cast<const Bf16*>(call_.query) + place.row * call_.query_row_stride +
                          place.head * call_.query_head_stride;
            }
            for (int pair = 0; pair < pairs; pair += WIDE) {
                __m512i words[WIDE];
                for (int i = 0; i < WIDE; ++i)
                    words[i] = dims(from[i] + 2 * pair, call_.head_dim - 2 * pair);
                transpose_words(words);
                for (int i = 0; i < WIDE && pair + i < pairs; ++i)
                    _mm512_store_si512(query_ + (pair + i) * stride_ + lane, words[i]);
            }
        }
    }

    // The keys that each lane sees.
    void find_keys() {
        const int lanes = unit_.head_lanes();
        for (int lane = 0; lane < stride_; ++lane) {
            const std::int64_t row = place_of(call_, unit_, lane < lanes ? lane : 0).row;
            std::int64_t first = call_.first[row], last = call_.last[row];
            if (first < unit_.first_key) first = unit_.first_key;
            if (last > unit_.last_key) last = unit_.last_key;
            first_[lane] = static_cast<std::int32_t>(first - start_);
            last_[lane] = last > first ? static_cast<std::int32_t>(last - start_) : first_[lane];
        }
    }

    // Groups as equal as they can be.
    void find_groups() {
        const int vectors = stride_ / WIDE;
        num_groups_ = (vectors + GROUP - 1) / GROUP;
        for (int group = 0, first = 0; group < num_groups_; ++group) {
            const int here = (vectors - first + num_groups_ - group - 1) / (num_groups_ - group);
            groups_[group] = seen_by(first * WIDE, here);
            first += here;
        }
    }

    Lanes seen_by(int first, int vectors) const {
        Lanes lanes{first, vectors, -NOTHING, NOTHING, NOTHING, -NOTHING};
        for (int lane = first; lane < first + vectors * WIDE; ++lane) {
            const int begin = first_[lane], end = last_[lane];
            if (begin < end && begin < lanes.begin) lanes.begin = begin;
            if (begin < end && end > lanes.end) lanes.end = end;
            if (begin > lanes.all_begin) lanes.all_begin = begin;
            if (end < lanes.all_end) lanes.all_end = end;
        }
        return lanes;
    }

    void take(const Tile<Bf16>& tile, const Tile<Bf16>& next) {
        Ahead<Bf16> ahead(call_, next, Memory{});
        const int key = static_cast<int>(tile.first - start_);
        pair_values(tile, ahead);
        for (int i = 0; i < num_groups_; ++i) {
            const Lanes& lanes = groups_[i];
            if (lanes.end <= key || lanes.begin >= key + TILE_KEYS) continue;
            switch (lanes.vectors) {
                case 1:
                    see<1>(lanes, tile, key, ahead);
                    break;
                case 2:
                    see<2>(lanes, tile, key, ahead);
                    break;
                default:
                    see<3>(lanes, tile, key, ahead);
            }
        }
        while (ahead.left() > 0) ahead.ask(TILE_KEYS);
    }

    // paired_[key / 2][dim]: a dim of two keys' values.
    void pair_values(const Tile<Bf16>& tile, Ahead<Bf16>& ahead) const {
        const int width = padded(call_.value_dim);
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        for (int key = 0; key < tile.count; key += 2) {
            ahead.ask(1);
            for (int d = 0; d < call_.value_dim; d += 32) {
                const __m512i a = dims(tile.values[key] + d, call_.value_dim - d);
                const __m512i b = dims(tile.values[key + 1] + d, call_.value_dim - d);
                const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
                std::int32_t* to = paired_ + key / 2 * width + d;
                _mm512_store_si512(to, _mm512_permutex2var_epi64(low, first, high));
                _mm512_store_si512(to + 16, _mm512_permutex2var_epi64(low, second, high));
            }
        }
    }

    // What a group's lanes see of a tile, whose first key is `key`.
    template <int V>
    void see(const Lanes& lanes, const Tile<Bf16>& tile, int key, Ahead<Bf16>& ahead) {
        alignas(64) float scores[TILE_KEYS * V * WIDE];
        const int count = lanes.end - key < tile.count ? lanes.end - key : tile.count;
        const int pairs = (count + 1) / 2;
        __m512 max[V];
        for (auto& each : max) each = _mm512_set1_ps(MINUS_INFINITY);
        for (int k = 0; k < count; k += KEYS) {
            ahead.ask(2);
            score<V>(tile.keys + k, lanes.first, scores + k * V * WIDE, max);
        }
        if (!lanes.see_all(key)) hide<V>(lanes, key, 2 * pairs, scores, max);
        __m512 fade[V];
        for (int v = 0; v < V; ++v) {
            float* const before = max_ + lanes.first + v * WIDE;
            const Vec old = load(before), here = (Vec)max[v] * (call_.scale * LOG2_E);
            const Vec largest = larger(old, here);
            store(before, largest);
            max[v] = (__m512)(largest == MINUS_INFINITY ? Vec{} : largest);
            const Vec one = Vec{} + 1.0f;  // `exp2` of 0 is a bit more: a sum over many tiles would drift
            fade[v] = (__m512)(largest == old ? one : kvspan::exp2(old - (Vec)max[v]));
        }
        weigh<V>(pairs, lanes.first, scores, max, fade);
        const auto* weights = reinterpret_cast<const std::int32_t*>(scores);
        for (int d = 0; d < call_.value_dim; d += DIMS) add<V>(d, pairs, lanes.first, weights, fade);
    }

    // Scores of KEYS keys, [KEYS][V vectors], and the largest so far.
    template <int V>
    KVSPAN_APART void score(const Bf16* const* rows, int lane, float* to, __m512 (&max)[V]) const {
        const Bf16* keys[KEYS];
        for (int k = 0; k < KEYS; ++k) keys[k] = rows[k];
        const std::int32_t* query = query_ + lane;
        const int stride = stride_, pairs = call_.head_dim / 2;
        __m512 sums[KEYS][V];
#pragma GCC unroll 24  // else they begin in memory
        for (int i = 0; i < KEYS * V; ++i) sums[i / V][i % V] = _mm512_setzero_ps();
        for (int pair = 0; pair < pairs; ++pair, query += stride) {
            __m512i q[V];
            for (int v = 0; v < V; ++v) q[v] = _mm512_load_si512(query + v * WIDE);
            for (int k = 0; k < KEYS; ++k) {
                const __m512i word = _mm512_set1_epi32(word_at(keys[k] + 2 * pair));
                for (int v = 0; v < V; ++v) sums[k][v] = dot(sums[k][v], q[v], word);
            }
        }
        __m512 largest[V];
        for (int v = 0; v < V; ++v) largest[v] = max[v];
#pragma GCC unroll 8
        for (int k = 0; k < KEYS; ++k) {
            for (int v = 0; v < V; ++v) {
                _mm512_store_ps(to + (k * V + v) * WIDE, sums[k][v]);
                largest[v] = _mm512_max_ps(largest[v], sums[k][v]);
            }
        }
        for (int v = 0; v < V; ++v) max[v] = largest[v];
    }

    // Takes the scores of keys that a lane does not see out of the count.
    template <int V>
    void hide(const Lanes& lanes, int key, int count, float* scores, __m512 (&max)[V]) const {
        const __m512 nothing = _mm512_set1_ps(MINUS_INFINITY);
        for (int v = 0; v < V; ++v) {
            const __m512i first = _mm512_loadu_si512(first_ + lanes.first + v * WIDE);
            const __m512i last = _mm512_loadu_si512(last_ + lanes.first + v * WIDE);
            max[v] = nothing;
            for (int k = 0; k < count; ++k) {
                const __m512i place = _mm512_set1_epi32(key + k);
                const __mmask16 seen =
                    _mm512_cmple_epi32_mask(first, place) & _mm512_cmplt_epi32_mask(place, last);
                float* const at = scores + (k * V + v) * WIDE;
                const __m512 score = _mm512_mask_blend_ps(seen, nothing, _mm512_load_ps(at));
                _mm512_store_ps(at, score);
                max[v] = _mm512_max_ps(max[v], score);
            }
        }
    }

    // Scores become weights, those of two neighbouring keys a word, where the scores were.
    template <int V>
    KVSPAN_APART void weigh(int pairs, int lane, float* scores, const __m512 (&max)[V],
                            const __m512 (&fade)[V]) {
        const __m512 scale = _mm512_set1_ps(call_.scale * LOG2_E);
        alignas(64) static constexpr std::uint16_t TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i turns = _mm512_load_si512(TURNS);
        __m512 sums[V], largest[V];
        for (int v = 0; v < V; ++v) {
            sums[v] = _mm512_mul_ps(_mm512_load_ps(sum_ + lane + v * WIDE), fade[v]);
            largest[v] = max[v];
        }
        auto* weights = reinterpret_cast<std::int32_t*>(scores);
        for (int pair = 0; pair < pairs; ++pair) {
            __m512i words[V];
            for (int v = 0; v < V; ++v) {
                const float* at = scores + (2 * pair * V + v) * WIDE;
                const __m512 even = weight(_mm512_fmsub_ps(_mm512_load_ps(at), scale, largest[v]));
                const __m512 second = _mm512_load_ps(at + V * WIDE);
                const __m512 odd = weight(_mm512_fmsub_ps(second, scale, largest[v]));
                sums[v] = _mm512_add_ps(sums[v], _mm512_add_ps(even, odd));
                words[v] = _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
            }
            for (int v = 0; v < V; ++v) _mm512_store_si512(weights + (pair * V + v) * WIDE, words[v]);
        }
        for (int v = 0; v < V; ++v) _mm512_store_ps(sum_ + lane + v * WIDE, sums[v]);
    }

    // 2^x for x <= 0 as `exp2` has it, but 2^-149 from -127 down, which is zero in bf16. Of max_ps, NaN passes as
    // the second argument alone.
    static KVSPAN_INLINE __m512 weight(__m512 x) {
        const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-127.0f), x), whole = _mm512_set1_ps(0x1.8p23f);
        const __m512 shifted = _mm512_add_ps(clamped, whole);
        const __m512 f = _mm512_sub_ps(clamped, _mm512_sub_ps(shifted, whole));
        __m512 y = _mm512_set1_ps(1.3276414e-3f);
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6755987e-3f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5507138e-2f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022119e-1f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314694e-1f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000012f));
        return (__m512)_mm512_add_epi32((__m512i)y, _mm512_slli_epi32((__m512i)shifted, 23));
    }

    // sums_[dim][lane] = sums_[dim][lane] * fade + the sum over pairs of keys of weights times values.
    template <int V>
    KVSPAN_APART void add(int d, int pairs, int lane, const std::int32_t* weights,
                          const __m512 (&fade)[V]) const {
        const std::int32_t* values = paired_ + d;
        const int width = padded(call_.value_dim), stride = stride_;
        float* const out = sums_ + static_cast<std::int64_t>(d) * stride + lane;
        __m512 sums[DIMS][V];
#pragma GCC unroll 24
        for (int i = 0; i < DIMS * V; ++i) {
            sums[i / V][i % V] =
                _mm512_mul_ps(_mm512_load_ps(out + i / V * stride + i % V * WIDE), fade[i % V]);
        }
        for (int pair = 0; pair < pairs; ++pair, values += width, weights += V * WIDE) {
            __m512i w[V];
            for (int v = 0; v < V; ++v) w[v] = _mm512_load_si512(weights + v * WIDE);
            for (int i = 0; i < DIMS; ++i) {
                const __m512i word = _mm512_set1_epi32(values[i]);
                for (int v = 0; v < V; ++v) sums[i][v] = dot(sums[i][v], w[v], word);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < DIMS; ++i) {
            for (int v = 0; v < V; ++v) _mm512_store_ps(out + i * stride + v * WIDE, sums[i][v]);
        }
    }

    // Lanes one below the other, as a partial result has them.
    void put(const Partial& partial) const {
        const int lanes = unit_.head_lanes(), width = padded(call_.value_dim);
        __builtin_memcpy(partial.max, max_, lanes * sizeof(float));
        __builtin_memcpy(partial.sum, sum_, lanes * sizeof(float));
        for (int lane = 0; lane < lanes; lane += WIDE) {
            for (int d = 0; d < width; d += WIDE) {
                __m512i rows[WIDE];
                for (int i = 0; i < WIDE; ++i) {
                    const float* from = sums_ + static_cast<std::int64_t>(d + i) * stride_ + lane;
                    rows[i] = d + i < call_.value_dim ? _mm512_load_si512(from) : _mm512_setzero_si512();
                }
                transpose_words(rows);
                float* const out = partial.out + static_cast<std::int64_t>(lane) * width + d;
                for (int i = 0; i < WIDE && lane + i < lanes; ++i)
                    _mm512_store_si512(out + i * width, rows[i]);
            }
        }
    }

    const Attention& call_;
    const Unit& unit_;
    const std::int64_t start_;  // the first key of the first tile
    const int stride_;          // lanes, filled up to whole vectors
    std::int32_t* const query_;
    std::int32_t* const paired_;
    float* const sums_;  // [value_dim][stride_]
    int num_groups_ = 0;
    Lanes groups_[MOST];
    std::int32_t first_[MOST_LANES], last_[MOST_LANES];  // of each lane, counted from `start_` on
    alignas(64) float max_[MOST_LANES], sum_[MOST_LANES];
};

}  // namespace
}  // namespace kvspan
