// What compilers are not left to decide about the innermost loops.
#pragma once

#define KVSPAN_INLINE inline __attribute__((always_inline))

// A loop that has all registers to itself, where a compiler would make one function of many such loops.
#define KVSPAN_APART __attribute__((noinline))
