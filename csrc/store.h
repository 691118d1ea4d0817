// Vectors of tokens on their way into a cache: as they are, or as codes of 8 bits with a scale for each
// part.
#pragma once

#include <cstdint>

#include "attention.h"

namespace kvspan {

// Rows [count, heads, dim], each for a slot of a block, or for none if the block is negative.
struct Store {
    Dtype dtype;
    const void* rows;
    std::int64_t row_stride, head_stride;
    std::int64_t count;
    const std::int64_t *blocks, *offsets;
    int heads;
    int part_dims[MAX_PARTS];  // together dim
    Dtype stored;              // `dtype`, or codes
    void* data;                // the cache; strides in elements
    std::int64_t block_stride, slot_head_stride, slot_stride;
    std::uint16_t* scales;  // of codes: bf16
    std::int64_t scale_block_stride, scale_head_stride, scale_slot_stride;
};

// Writes on at most `threads` threads. No two rows may have one slot.
void store(const Store& call, int threads);

}  // namespace kvspan
