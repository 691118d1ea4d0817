// What a rank's partial attention contributes to attention over all keys, to be summed over the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange.h"

namespace kvspan {

// out[r][h] times this rank's share in the softmax over all keys, in float32; of everybody's piece in
// turn.
struct Share {
    Dtype dtype;
    const std::byte* out;  // [rows, heads, head_dim], contiguous; normalised over this rank's keys
    std::int64_t rows, heads, head_dim;
    const float* lse;  // [ranks, rows, heads]; not finite = no key seen, whatever `out` then holds
    int ranks, rank;
    std::vector<Piece> pieces;
    float* weights;  // room for (ranks + 2) * rows * heads
    float* to;       // room for all pieces
};

void take_share(const Share& call);

// Rounds a sum over the ranks.
void round_to(Dtype dtype, const float* from, std::int64_t count, std::byte* to);

}  // namespace kvspan
