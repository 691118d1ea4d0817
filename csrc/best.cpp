#include "best.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "elements.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t BLOCK = 1024;  // looked through at once

// Floats of one sign are in the order of their bits as whole numbers, and negative ones in reverse.
KVSPAN_INLINE std::int32_t ordered(float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

KVSPAN_CLONES float largest_of(const float* x, std::int64_t size) {
    std::int32_t most = ordered(-std::numeric_limits<float>::infinity()), magnitude = 0;
    for (std::int64_t i = 0; i < size; ++i) {
        most = std::max(most, ordered(x[i]));
        magnitude = std::max(magnitude, std::bit_cast<std::int32_t>(x[i]) & 0x7fffffff);
    }
    if (magnitude > 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    return std::bit_cast<float>(most ^ ((most >> 31) & 0x7fffffff));
}

KVSPAN_CLONES bool has(const float* x, std::int64_t size, float value) {
    int found = 0;
    for (std::int64_t i = 0; i < size; ++i) found |= x[i] == value;
    return found;
}

std::int64_t first_place(const float* x, std::int64_t size, float value) {
    for (std::int64_t start = 0; start < size; start += BLOCK) {
        const std::int64_t here = std::min(BLOCK, size - start);
        if (has(x + start, here, value)) return std::find(x + start, x + start + here, value) - x;
    }
    return 0;  // of a NaN
}

}  // namespace

void find_best(const Best& call, int threads) {
    parallel_for(call.rows, threads, [&](std::int64_t row) {
        const float* const logits = call.logits + row * call.stride;
        call.values[row] = largest_of(logits, call.size);
        call.places[row] = first_place(logits, call.size, call.values[row]);
    });
}

}  // namespace kvspan
