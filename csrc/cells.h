// What a cache holds, as AVX-512's dot products of bf16 pairs want it: vectors of 32 bf16. For files
// compiled for AVX-512-BF16 and VBMI alone.
//
// Codes of 8 bits become bf16 exactly, 64 at a time: 7 bits of a code look up the high and the low byte in
// tables of 128, its sign is put on top, and the bytes are interleaved. Dot products leave little room for
// instructions of three operands beside them, so the sign of an e4m3 is put there by one of two: its table
// holds what differs between the high byte and the code. That keeps each 16 in order and leaves
// 64 dims in an order of its own, in which a query is arranged too; what it does to outputs, `restore` undoes.
// Tables hold no subnormal bf16, which the dot product would take for zero.
//
// `Cells` gives:
//     DIMS, VECTORS     of a load
//     load              DIMS dims of a key, or zeros from the `left`-th on
//     pairs             of two keys' DIMS dims, each two that belong together side by side
//     arrange           DIMS dims of a query in the order in which `load` leaves them
//     restore           puts DIMS sums over `pairs` in order
// and for codes:
//     widen             what `load` does, of codes in a register
#pragma once

#include "bf16.h"
#include "vectors.h"

namespace kvspan {
namespace {

KVSPAN_INLINE void fetch_line(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

struct Bf16Cells {
    using Element = Bf16;
    static constexpr int DIMS = 32, VECTORS = 1;

    KVSPAN_INLINE void load(const Bf16* p, int left, __m512i (&to)[1]) const { to[0] = dims(p, left); }

    KVSPAN_INLINE void pairs(const Bf16* even, const Bf16* odd, int left, __m512i* to) const {
        const __m512i a = dims(even, left), b = dims(odd, left);
        to[0] = _mm512_unpacklo_epi16(a, b);
        to[1] = _mm512_unpackhi_epi16(a, b);
    }

    static void arrange(__m512i (&)[1]) {}

    static void restore(float* sums) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        const __m512i low = _mm512_load_si512(sums), high = _mm512_load_si512(sums + 16);
        _mm512_store_si512(sums, _mm512_permutex2var_epi64(low, first, high));
        _mm512_store_si512(sums + 16, _mm512_permutex2var_epi64(low, second, high));
    }
};

// Codes of 0..127 as bf16; what a code looks up, what it finds of the high byte, and that with the sign.
template <class Code>
struct Codes;

template <>
struct Codes<I8> {
    static constexpr int bf16_of(int magnitude) {
        return static_cast<int>(__builtin_bit_cast(std::uint32_t, static_cast<float>(magnitude)) >> 16);
    }
    // The instruction for it has to wait for the units that multiply.
    static __m512i magnitude(__m512i codes) {
        return _mm512_min_epu8(codes, _mm512_sub_epi8(_mm512_setzero_si512(), codes));
    }
    static constexpr int found(int magnitude) { return bf16_of(magnitude) >> 8; }
    static __m512i high(__m512i found, __m512i codes) {
        return _mm512_ternarylogic_epi64(found, codes, _mm512_set1_epi8(-128), 0xf8);  // a | (b & c)
    }
};

template <>
struct Codes<E4m3> {
    static constexpr int bf16_of(int magnitude) {
        const int exponent = magnitude >> 3, fraction = magnitude & 7;
        if (magnitude == 0x7f) return 0x7fc0;  // not a number
        if (exponent > 0) return (exponent + 120) << 7 | fraction << 4;
        return fraction ? Codes<I8>::bf16_of(fraction) - (9 << 7) : 0;  // times 2^-9
    }
    static __m512i magnitude(__m512i codes) { return codes; }  // the table ignores the sign
    static constexpr int found(int magnitude) { return bf16_of(magnitude) >> 8 ^ magnitude; }
    static __m512i high(__m512i found, __m512i codes) { return _mm512_xor_si512(found, codes); }
};

// What each code without its sign finds of the bytes of its bf16.
template <class Code>
struct Bytes128 {
    alignas(64) std::uint8_t high[128] = {}, low[128] = {};

    constexpr Bytes128() {
        for (int i = 0; i < 128; ++i) {
            high[i] = static_cast<std::uint8_t>(Codes<Code>::found(i));
            low[i] = static_cast<std::uint8_t>(Codes<Code>::bf16_of(i));
        }
    }
};

template <class Code>
constexpr Bytes128<Code> BYTES{};

template <class Code>
class CodeCells {
public:
    using Element = Code;
    static constexpr int DIMS = 64, VECTORS = 2;

    CodeCells() {
        for (int i = 0; i < 2; ++i) {
            high_[i] = _mm512_load_si512(BYTES<Code>.high + 64 * i);
            low_[i] = _mm512_load_si512(BYTES<Code>.low + 64 * i);
        }
    }

    KVSPAN_INLINE void load(const Code* p, int left, __m512i (&to)[2]) const { widen(codes(p, left), to); }

    KVSPAN_INLINE void widen(__m512i codes, __m512i* to) const {
        const __m512i magnitude = Codes<Code>::magnitude(codes);
        const __m512i low = _mm512_permutex2var_epi8(low_[0], magnitude, low_[1]);
        const __m512i found = _mm512_permutex2var_epi8(high_[0], magnitude, high_[1]);
        const __m512i high = Codes<Code>::high(found, codes);
        to[0] = _mm512_unpacklo_epi8(low, high);
        to[1] = _mm512_unpackhi_epi8(low, high);
    }

    KVSPAN_INLINE void pairs(const Code* even, const Code* odd, int left, __m512i* to) const {
        const __m512i a = codes(even, left), b = codes(odd, left);
        widen(_mm512_unpacklo_epi8(a, b), to);
        widen(_mm512_unpackhi_epi8(a, b), to + 2);
    }

    static void arrange(__m512i (&query)[2]) {
        const __m512i low = query[0], high = query[1];
        query[0] = _mm512_shuffle_i32x4(low, high, 0x88);
        query[1] = _mm512_shuffle_i32x4(low, high, 0xdd);
    }

    // What `load` leaves, in the order of the cache.
    static void put_in_order(__m512i (&vectors)[2]) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        const __m512i low = vectors[0], high = vectors[1];
        vectors[0] = _mm512_permutex2var_epi64(low, first, high);
        vectors[1] = _mm512_permutex2var_epi64(low, second, high);
    }

    // Sum i holds dims 4 * i .. 4 * i + 3 of each 16.
    static void restore(float* sums) {
        __m512 s[4], t[4];
        for (int i = 0; i < 4; ++i) s[i] = _mm512_load_ps(sums + 16 * i);
        for (int i = 0; i < 2; ++i) {
            t[i] = _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0x44);
            t[i + 2] = _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0xee);
        }
        for (int i = 0; i < 2; ++i) {
            _mm512_store_ps(sums + 32 * i, _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0x88));
            _mm512_store_ps(sums + 32 * i + 16, _mm512_shuffle_f32x4(t[2 * i], t[2 * i + 1], 0xdd));
        }
    }

private:
    static KVSPAN_INLINE __m512i codes(const Code* p, int left) {
        if (left >= 64) return _mm512_loadu_si512(p);
        return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8((1ull << left) - 1, p);
    }

    __m512i high_[2], low_[2];
};

}  // namespace
}  // namespace kvspan
