// What AVX-512's dot products of bf16 pairs need around them. For files compiled for AVX-512-BF16 alone.
#pragma once

#include <immintrin.h>

#include "spin.h"
#include "vectors.h"

namespace kvspan {
namespace {

// 32 dims of a vector, or zeros from the `left`-th on.
KVSPAN_INLINE __m512i dims(const Bf16* p, int left) {
    if (left >= 32) return _mm512_loadu_si512(p);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << left) - 1, p);
}

KVSPAN_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// 2^x for x <= 0, to 2 ulp; 0 below the smallest normal number, and for -inf: what it makes of those on
// the way is masked at the end. NaN stays what it is.
KVSPAN_INLINE __m512 exp2_of(__m512 x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m512 magic = _mm512_set1_ps(0x1.8p23f), shifted = _mm512_add_ps(x, magic);
    const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
    __m512 y = _mm512_set1_ps(1.3276414e-3f);  // as in vectors.h
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6755987e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5507138e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022119e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314694e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000012f));
    const __m512i power = _mm512_slli_epi32((__m512i)shifted, 23);
    return (__m512)_mm512_maskz_add_epi32(normal, (__m512i)y, power);
}

inline void fetch(const Bf16* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// Lane i of the result is the sum of sums[i].
KVSPAN_INLINE __m512 reduce(const __m512 (&sums)[16]) {
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

// See `spin` in isa.h.
inline double spin_dots(std::int64_t rounds) {
    const auto step = [](__m512 sum, __m512i x) __attribute__((always_inline)) {
        return dot(sum, x, x);
    };
    spin_in_registers<__m512>(rounds, _mm512_setzero_si512(), step);
    return 64.0 * CHAINS * static_cast<double>(rounds);
}

}  // namespace
}  // namespace kvspan
