// What the checks of the native code share: random numbers that every dtype holds exactly, the bytes of
// numbers in each dtype, and verdicts.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "isa.h"

namespace kvspan::check {

using Random = std::mt19937;
using Bytes = std::vector<std::uint8_t>;

inline int pick(Random& random, int low, int high) {
    return std::uniform_int_distribution(low, high)(random);
}

// In [-2, 2], and held exactly by all dtypes of floats.
inline float number(Random& random) { return static_cast<float>(pick(random, -64, 64)) / 32.0f; }

inline std::vector<float> numbers(Random& random, std::int64_t count) {
    std::vector<float> found(count);
    for (auto& x : found) x = number(random);
    return found;
}

// Numbers as elements of 16 or 32 bits, in a buffer that ends where they do. Exact, so for numbers that
// the dtype holds, and for NaN.
Bytes encoded(const std::vector<float>& numbers, Dtype dtype);

// Element i of any dtype.
double decoded(const void* elements, Dtype dtype, std::int64_t i);

// bf16 of a number that it holds.
std::uint16_t exact_bf16(float x);

// The larger error of the two; a NaN is larger than all.
inline double worse(double a, double b) { return a != a || b <= a ? a : b; }

// How far a result is off, in parts of its size or of 1.
inline double error_of(double found, double wanted) {
    const double size = wanted < 0 ? -wanted : wanted, off = found - wanted;
    return (off < 0 ? -off : off) / (1.0 + size);
}

// Half a unit in the last place, in parts of a number, and room for sums.
inline double bound_of(Dtype dtype) {
    return dtype == Dtype::f32 ? 1e-5 : dtype == Dtype::bf16 ? 1.2e-2 : 1.5e-3;
}

// Says how a check went; 1 if it went wrong.
int judge(const std::string& what, double worst, double bound);

std::string name_of(Dtype dtype);
std::string name_of(Isa isa);

// The instruction sets that run here.
std::vector<Isa> isas();

constexpr Dtype FLOATS[] = {Dtype::f32, Dtype::bf16, Dtype::f16};

// Each gives how many of its verdicts were bad.
int check_attention();
int check_linear();
int check_rows();
int check_moves();
int check_store();
int check_parallel();
int check_exchange();
int check_experts();

}  // namespace kvspan::check
