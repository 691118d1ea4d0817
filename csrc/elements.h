// Elements that ranks exchange, one at a time: conversions without branches, which compilers vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "inline.h"

namespace kvspan {
namespace {

// Marks a loop that is worth a version for each instruction set; the loader picks one.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define KVSPAN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVSPAN_CLONES
#endif

// e^x for x <= 0, to some ulp; 0 below the smallest normal number, and for -inf.
KVSPAN_INLINE float exp_of(float x) {
    const float power = x * 1.44269504f;
    const float clamped = power > -126.0f ? power : -126.0f;
    const float shifted = clamped + 0x1.8p23f;  // rounds to a whole number, which fills the low bits
    const float f = clamped - (shifted - 0x1.8p23f);  // in [-1/2, 1/2]
    float y = 1.5403530e-4f;                          // ln(2)^k / k!, k = 6 .. 0
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    const float scaled = std::bit_cast<float>(std::bit_cast<std::uint32_t>(y) +
                                              (std::bit_cast<std::uint32_t>(shifted) << 23));
    return power >= -126.0f ? scaled : 0.0f;
}

// Each kind of element: how it is stored, and how it becomes a float and is rounded back, to even.
struct AsF32 {
    using Stored = float;
    static KVSPAN_INLINE float widen(float x) { return x; }
    static KVSPAN_INLINE float round(float x) { return x; }
};

struct AsBf16 {
    using Stored = std::uint16_t;
    static KVSPAN_INLINE float widen(std::uint16_t x) {
        return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
    }
    static KVSPAN_INLINE std::uint16_t round(float x) {
        const auto bits = std::bit_cast<std::uint32_t>(x);
        const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<std::uint16_t>(x != x ? 0x7fc0u : rounded);
    }
};

struct AsF16 {
    using Stored = std::uint16_t;
    static KVSPAN_INLINE float widen(std::uint16_t x) {
        const std::uint32_t magnitude = (x & 0x7fffu) << 13;
        const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
        const std::uint32_t special =
            magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // infinite, not a number
        return std::bit_cast<float>(scaled | special | ((x & 0x8000u) << 16));
    }
    static KVSPAN_INLINE std::uint16_t round(float x) {
        const auto bits = std::bit_cast<std::uint32_t>(x);
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
        // An ulp of 0.5 is the smallest subnormal, so that the addition rounds.
        const std::uint32_t tiny =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
        std::uint32_t half = magnitude < 0x38800000u ? tiny : normal;
        half = magnitude >= 0x477ff000u ? 0x7c00u : half;
        half = magnitude > 0x7f800000u ? 0x7e00u : half;
        return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
    }
};

}  // namespace
}  // namespace kvspan
