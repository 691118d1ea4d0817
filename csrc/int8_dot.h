// Attention of bf16 queries over int8: scores as `Bf16Dot` makes them, exact up to float32, and values
// by AVX-512's dot products of bytes, which sum in int32 and take codes as they are. For files compiled
// for AVX-512-VNNI, BF16 and VBMI alone.
//
// Weights are whole numbers, of which the largest of a lane is 65535: each is within 2^-17 of its lane's
// largest in the tile, where a bf16 would be within 2^-9 of itself. Most numbers of lanes are
// `Int8Few`'s and `Int8Group`'s.
//
// Knows no scales below zero.
#pragma once

#include <cstdint>

#include "bf16.h"
#include "bf16_dot.h"
#include "cells.h"
#include "flash.h"
#include "int8_few.h"
#include "int8_group.h"
#include "int8_sum.h"

namespace kvspan {
namespace {

class Int8Dot : public Bf16Dot<CodeCells<I8>> {
public:
    // Those that take most numbers of lanes from scores to sums.
    struct Group {
        static bool takes(const Attention& call, int lanes) {
            return Int8Few::takes(call, lanes) || Int8Group::takes(call, lanes);
        }

        static void load_query(const Attention& call, const Unit& unit, int first,
                               const Scratch& scratch) {
            const bool few = Int8Few::takes(call, unit.head_lanes());
            (few ? Int8Few::load_query : Int8Group::load_query)(call, unit, first, scratch);
        }

        static void take(const Attention& call, const Unit& unit, const Tile<I8>& tile, Ahead<I8>& ahead,
                         const Scratch& scratch, const Partial& partial, Vec* sums) {
            const bool few = Int8Few::takes(call, unit.head_lanes());
            (few ? Int8Few::take : Int8Group::take)(call, unit, tile, ahead, scratch, partial, sums);
        }
    };

    static void load_query(const Attention& call, const Unit& unit, int first, const Scratch& scratch) {
        const bool grouped = Group::takes(call, unit.head_lanes());
        (grouped ? Group::load_query : Bf16Dot::load_query)(call, unit, first, scratch);
    }

    static Vec weigh(const Tile<I8>& tile, const Scratch& scratch, int lane, float scale, float max) {
        const float* scores = scratch.scores + lane * TILE_KEYS;
        __m512 weights[4], total = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512 x = _mm512_fmsub_ps(_mm512_load_ps(scores + 16 * i), _mm512_set1_ps(scale),
                                             _mm512_set1_ps(max));
            const __m512 weight = exp2_of(x);
            total = _mm512_add_ps(total, weight);
            weights[i] = _mm512_mul_ps(weight, _mm512_load_ps(tile.value_scales + 16 * i));
        }
        ByteWeights::put(weights, 1.0f, scratch.weights + lane * TILE_KEYS);
        return (Vec)total;
    }

    static void accumulate(const Attention& call, int lanes, const Tile<I8>& tile, Ahead<I8>& ahead,
                           const Scratch& scratch, const float* fade, float* out) {
        ByteSum::run(call, 0, lanes, tile, ahead, scratch, fade, out);
    }

    static void finish(const Attention& call, const Unit& unit, float* out) {
        const std::int64_t size = static_cast<std::int64_t>(unit.lanes()) * padded(call.value_dim);
        for (std::int64_t i = 0; i < size; i += ByteSum::CHUNK) CodeCells<E4m3>::restore(out + i);
    }
};

}  // namespace
}  // namespace kvspan
