// The largest logit of each row, and the first place where it stands.
#pragma once

#include <cstdint>

namespace kvspan {

struct Best {
    const float* logits;
    std::int64_t rows, stride, size;
    float* values;  // NaN if the row has one, -inf if it has nothing else
    std::int64_t* places;
};

// On at most `threads` threads.
void find_best(const Best& call, int threads);

}  // namespace kvspan
