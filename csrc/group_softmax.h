// What softmax does of a tile for 5 to 16 lanes together. Knows no products: neither where scores come from
// nor what weights are for. For files compiled for AVX-512 alone.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bf16_wide.h"
#include "flash.h"

namespace kvspan {
namespace {

// Multiplies scores by the keys' scales, and hides keys that a lane does not see; most[lane] has the
// largest of each vector, up to a multiple of 8 lanes.
template <class T>
inline void settle_group(const Attention& call, const Unit& unit, const Tile<T>& tile, const Scratch& scratch,
                         float (*most)[WIDE]) {
    const __m512 nothing = _mm512_set1_ps(MINUS_INFINITY);
    __m512 units[4];
    for (int v = 0; v < 4; ++v) units[v] = _mm512_load_ps(tile.key_scales[0] + WIDE * v);
    int lane = 0;
    for (int row = 0; row < unit.rows; ++row) {
        const std::int64_t at = unit.first_row + row;
        const std::uint64_t seen = tile.seen & visible(call.first[at], call.last[at], tile.first);
        for (int head = 0; head < unit.heads; ++head, ++lane) {
            __m512 max = nothing;
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                float* scores = scratch.scores + lane * TILE_KEYS + WIDE * v;
                const auto here = static_cast<__mmask16>(seen >> (WIDE * v));
                const __m512 score = _mm512_mask_mul_ps(nothing, here, _mm512_load_ps(scores), units[v]);
                _mm512_store_ps(scores, score);
                max = _mm512_max_ps(score, max);
            }
            _mm512_store_ps(most[lane], max);
        }
    }
    for (; lane % 8; ++lane) _mm512_store_ps(most[lane], nothing);
}

// Of eight vectors: quarters 0 and 2 of the result have the largest of four each.
KVSPAN_INLINE __m512 halves_of(const float (*most)[WIDE]) {
    __m512 a[4], b[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 low = _mm512_load_ps(most[i]), high = _mm512_load_ps(most[i + 4]);
        a[i] = _mm512_max_ps(_mm512_shuffle_f32x4(low, high, 0x44),
                             _mm512_shuffle_f32x4(low, high, 0xee));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        b[i] = _mm512_max_ps(_mm512_unpacklo_ps(a[i], a[i + 2]), _mm512_unpackhi_ps(a[i], a[i + 2]));
    const __m512 c = _mm512_max_ps(_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1]));
    return _mm512_max_ps(c, _mm512_shuffle_f32x4(c, c, 0xb1));
}

// Lane i of the result is the largest of most[i], for all lanes that there are.
KVSPAN_INLINE __m512 largest_of(int lanes, const float (*most)[WIDE]) {
    const __m512 first = halves_of(most), second = lanes > WIDE / 2 ? halves_of(most + WIDE / 2) : first;
    return _mm512_shuffle_f32x4(first, second, 0x88);
}

inline __m512 finite(__m512 x) {
    const __mmask16 none = _mm512_cmp_ps_mask(x, _mm512_set1_ps(MINUS_INFINITY), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(x, none, _mm512_setzero_ps());
}

// 2^x for x <= 0, to 2 ulp, and 1 of 0: what tiles are multiplied by again and again.
KVSPAN_INLINE __m512 exp2_from(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, 9);  // x - floor(x)
    __m512 y = _mm512_set1_ps(1.86713168e-3f);  // the polynomial with the least error there: 1.4e-7
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.01702698e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.57999164e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40164444e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93151295e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, x);
}

// Raises lanes' largest scores, in log2, to those of a tile, whose scores `scales` brings there. Exponents
// are counted from `anchor`, and earlier tiles are multiplied by `fade`.
KVSPAN_INLINE void raise_group(int lanes, __m512 scales, const float (*most)[WIDE], float* max, float* fade,
                               float* anchor) {
    const auto there = static_cast<__mmask16>((1u << lanes) - 1);
    const __m512 here = _mm512_mul_ps(largest_of(lanes, most), scales);
    const __m512 before = _mm512_mask_loadu_ps(_mm512_set1_ps(MINUS_INFINITY), there, max);
    const __m512 after = _mm512_max_ps(before, here), from = finite(after);  // NaN if `here` is
    _mm512_mask_storeu_ps(max, there, after);
    _mm512_store_ps(anchor, from);
    _mm512_store_ps(fade, exp2_from(_mm512_sub_ps(before, from)));
}

}  // namespace
}  // namespace kvspan
