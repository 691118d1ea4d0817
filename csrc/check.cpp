// Random calls of all native code against the same written out, for the sanitizers: every buffer ends
// where its last element does, and what must not be read holds NaN.
#include "check.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace kvspan::check {

Bytes encoded(const std::vector<float>& numbers, Dtype dtype) {
    const std::size_t width = dtype == Dtype::f32 ? 4 : 2;
    Bytes out(numbers.size() * width);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, &numbers[i], 4);
        std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
        if (dtype == Dtype::f16) {
            const std::uint32_t magnitude = bits & 0x7fffffffu;
            const std::uint32_t exponent = std::isnan(numbers[i]) ? 0x7e00u
                                           : magnitude            ? (magnitude - 0x38000000u) >> 13
                                                                  : 0u;
            half = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | exponent);
        }
        std::memcpy(&out[i * width], dtype == Dtype::f32 ? static_cast<void*>(&bits) : &half, width);
    }
    return out;
}

// Of a number with a sign, `exponent_bits` of an exponent and `fraction_bits` of a fraction.
double small_float(int bits, int exponent_bits, int fraction_bits) {
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int whole = exponent ? fraction + (1 << fraction_bits) : fraction;
    const double size = std::ldexp(whole, (exponent ? exponent : 1) - bias - fraction_bits);
    return bits >> (exponent_bits + fraction_bits) & 1 ? -size : size;
}

double decoded(const void* elements, Dtype dtype, std::int64_t i) {
    const auto* bytes = static_cast<const std::uint8_t*>(elements);
    float wide;
    std::uint16_t half;
    switch (dtype) {
        case Dtype::f32:
            std::memcpy(&wide, bytes + i * 4, 4);
            return wide;
        case Dtype::i8:
            return static_cast<std::int8_t>(bytes[i]);
        case Dtype::e4m3:
            return (bytes[i] & 0x7f) == 0x7f ? NAN : small_float(bytes[i], 4, 3);
        case Dtype::bf16:
            std::memcpy(&half, bytes + i * 2, 2);
            return (half & 0x7fff) > 0x7f80 ? NAN : small_float(half, 8, 7);
        default:
            std::memcpy(&half, bytes + i * 2, 2);
            return (half & 0x7fff) > 0x7c00 ? NAN : small_float(half, 5, 10);
    }
}

std::uint16_t exact_bf16(float x) {
    std::uint16_t half;
    std::memcpy(&half, encoded({x}, Dtype::bf16).data(), 2);
    return half;
}

int judge(const std::string& what, double worst, double bound) {
    const bool right = worst <= bound;
    std::printf("%-48s error %.1e%s\n", what.c_str(), worst, right ? "" : " is too large");
    std::fflush(stdout);  // a sanitizer may end the process in the next check
    return !right;
}

std::string name_of(Dtype dtype) {
    constexpr const char* NAMES[] = {"float32", "bf16", "fp16", "int8", "e4m3"};
    return NAMES[static_cast<int>(dtype)];
}

std::string name_of(Isa isa) {
    constexpr const char* NAMES[] = {"portable", "avx2", "avx512"};
    return NAMES[static_cast<int>(isa)];
}

std::vector<Isa> isas() {
    std::vector<Isa> found;
    for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
        if (available(isa)) found.push_back(isa);
    }
    return found;
}

}  // namespace kvspan::check

int main() {
    using namespace kvspan::check;
    return check_attention() + check_linear() + check_rows() + check_moves() + check_store() +
               check_exchange() + check_parallel() + check_experts() >
           0;
}
