// Vectors of floats as wide as the instruction set that a file is compiled for, by the compiler's own
// vector types: the same source serves SSE2, AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"
#include "narrow.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvspan {
namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef std::int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef std::uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
typedef std::int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef float Quad __attribute__((vector_size(16)));

// Elements of a cache beside floats: 16 bits of either kind, or codes of 8, with a scale elsewhere.
struct Bf16 {
    std::uint16_t bits;
};
struct F16 {
    std::uint16_t bits;
};
struct I8 {
    std::int8_t bits;
};
struct E4m3 {
    std::uint8_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec as_floats(Words w) {
    Vec v;
    std::memcpy(&v, &w, sizeof v);
    return v;
}

inline Words as_words(Vec v) {
    Words w;
    std::memcpy(&w, &v, sizeof w);
    return w;
}

inline Vec load(const Bf16* p) {
#if defined(__AVX512F__)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return as_floats(__builtin_convertvector(h, Words) << 16);
#endif
}

inline Vec load(const F16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Halves h;
    std::memcpy(&h, p, sizeof h);
    const Words w = __builtin_convertvector(h, Words);
    const Words magnitude = (w & 0x7fffu) << 13;
    const Words scaled = as_words(as_floats(magnitude) * 0x1p112f);  // subnormals too
    const Words special = (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return as_floats(scaled | special | ((w & 0x8000u) << 16));
#endif
}

inline Vec load(const I8* p) {
    Bytes b;
    std::memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, Ints), Vec);
}

// Exponent and fraction are moved to where a float has them. A subnormal is then read as a number with a
// leading 1, which is taken off again: no float here is subnormal, so no mode of the processor matters.
inline Vec load(const E4m3* p) {
    Bytes b;
    std::memcpy(&b, p, sizeof b);
    const Words w = (Words)__builtin_convertvector(b, Ints);
    const Words bits = ((w & 0x7fu) << 20) + (120u << 23);
    const Vec normal = as_floats(bits);
    const Vec value = bits >= (121u << 23) ? normal : (normal - 0x1p-7f) * 2.0f;
    return as_floats(as_words(value) | (w & 0x80000000u));  // the sign was carried up
}

// The first `count` < WIDTH elements, then zeros; nothing behind them is read.
template <class T>
inline Vec load_some(const T* p, int count) {
    T padded[WIDTH] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

// The same, or a whole vector where there are so many.
template <class T>
inline Vec load_up_to(const T* p, int count) {
    return count >= WIDTH ? load(p) : load_some(p, count);
}

// The bits of the nearest bf16.
inline Words nearest_bf16(Vec v) {
    const Words w = as_words(v);
    const Words nearest = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    const Words quiet_nan = (w >> 16) | 0x40u;
    return v == v ? nearest : quiet_nan;
}

inline void store(Bf16* p, Vec v) {
#if defined(__AVX512BF16__)  // which takes subnormals for zero
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
    const Halves h = __builtin_convertvector(nearest_bf16(v), Halves);
#endif
    std::memcpy(p, &h, sizeof h);
}

inline void store(F16* p, Vec v) {
#if defined(__AVX512F__)
    const __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
#elif defined(__F16C__)
    const __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(p, &h, sizeof h);
#else
    for (int i = 0; i < WIDTH; ++i) p[i].bits = to_f16(v[i]);
#endif
}

template <class T>
inline void store_up_to(T* p, Vec v, int count) {
    if (count >= WIDTH) return store(p, v);
    T whole[WIDTH];
    store(whole, v);
    std::memcpy(p, whole, count * sizeof(T));
}

// The value that a store and a load leave.
template <class T>
inline Vec rounded(Vec v) {
    T stored[WIDTH];
    store(stored, v);
    return load(stored);
}

template <>
inline Vec rounded<float>(Vec v) {
    return v;
}

#if defined(__AVX512BF16__)
template <>
inline Vec rounded<Bf16>(Vec v) {
    const __m256i h = (__m256i)_mm512_cvtneps_pbh((__m512)v);
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}
#else
template <>
inline Vec rounded<Bf16>(Vec v) {
    return as_floats(nearest_bf16(v) << 16);
}
#endif

inline Quad narrow(Vec v) {
#if defined(__AVX512F__)
    typedef float Oct __attribute__((vector_size(32)));
    const Oct o = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(o, o, 0, 1, 2, 3) + __builtin_shufflevector(o, o, 4, 5, 6, 7);
#elif defined(__AVX__)
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
    return v;
#endif
}

inline float sum(Vec v) {
    const Quad q = narrow(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

inline Vec larger(Vec a, Vec b) {  // of which `b` if one is not a number
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float largest(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float max = v[0];
    for (int i = 1; i < WIDTH; ++i) max = v[i] > max ? v[i] : max;
    return max;
#endif
}

inline bool any_above(Vec v, float x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ) != 0;
#else
    return largest(v) > x;
#endif
}

// 2^x for x <= 0, to 2 ulp; 0 below the smallest normal number, and for -inf; NaN stays what it is.
inline Vec exp2(Vec x) {
    const Vec clamped = larger(splat(-126.0f), x);  // the second, if it is not a number
    const Vec shifted = clamped + 0x1.8p23f;        // rounds to a whole number, which fills the low bits
    const Vec f = clamped - (shifted - 0x1.8p23f);  // in [-1/2, 1/2]
    Vec y = splat(1.3276414e-3f);  // the polynomial with the least relative error there: 7.5e-8
    y = y * f + 9.6755987e-3f;
    y = y * f + 5.5507138e-2f;
    y = y * f + 2.4022119e-1f;
    y = y * f + 6.9314694e-1f;
    y = y * f + 1.00000012f;
    const Words scaled = as_words(y) + (as_words(shifted) << 23);
    return x < -126.0f ? Vec{} : as_floats(scaled);
}

// x / (1 + e^-x).
inline Vec silu(Vec x) {
    const Vec fall = exp2((x < 0.0f ? x : -x) * 1.44269504f);  // e^-|x|: never overflows
    return x * (x < 0.0f ? fall : fall * 0.0f + 1.0f) / (fall + 1.0f);
}

}  // namespace
}  // namespace kvspan
