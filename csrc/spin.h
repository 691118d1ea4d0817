// Arithmetic in registers alone, which shows what a core can do at most.
#pragma once

#include <cstdint>

namespace kvspan {
namespace {

// Sums under way: more than the latency of any unit asks for, times its width.
constexpr int CHAINS = 12;

// Runs `step(sum, number)` on CHAINS sums, `rounds` times. The compiler may foresee neither the number
// nor any sum, or it would merge sums that are alike; an index that is not a constant would keep them in
// memory.
template <class Sum, class Number, class Step>
inline void spin_in_registers(std::int64_t rounds, Number number, Step step) {
    Sum first[CHAINS] = {}, sums[CHAINS];
    asm volatile("" : "+m"(first));
#pragma GCC unroll 12
    for (int k = 0; k < CHAINS; ++k) sums[k] = first[k];
    for (std::int64_t i = 0; i < rounds; ++i) {
        asm volatile("" : "+m"(number));
        const Number here = number;
#pragma GCC unroll 12
        for (int k = 0; k < CHAINS; ++k) sums[k] = step(sums[k], here);
    }
    Sum total = sums[0];
#pragma GCC unroll 12
    for (int k = 1; k < CHAINS; ++k) total += sums[k];
    asm volatile("" : : "m"(total));
}

}  // namespace
}  // namespace kvspan
