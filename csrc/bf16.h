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
    const auto step = [](__m512 sum, __m512i x) __attribute__((always_inline)) { return dot(sum, x, x); };
    spin_in_registers<__m512>(rounds, _mm512_setzero_si512(), step);
    return 64.0 * CHAINS * static_cast<double>(rounds);
}

}  // namespace
}  // namespace kvspan
