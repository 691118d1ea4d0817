// Paged attention on a CPU: what the driver, the kernels of each instruction set and the bindings share.
//
// A call is cut in units: some query rows of one sequence and some KV heads, over a range of its keys. A
// kernel works through one unit, tile by tile of TILE_KEYS keys, and leaves a partial result: an
// unnormalised output, the largest score and the sum of exponentials. The driver merges partials.
//
// Of few rows a unit has all KV heads, and takes a tile's heads one after the other: their slots lie side
// by side, and a processor that fetches ahead reads memory in order at twice the speed of pieces.
//
// Scores are kept in units of log2, so that exponentials are powers of two; the LSE that leaves is
// natural.
#pragma once

#include <cstddef>
#include <cstdint>

#include "soon.h"

namespace kvspan {

constexpr int TILE_KEYS = 64;    // so that the keys of a tile that a row sees are the bits of a word
constexpr int MAX_LANES = 96;    // of a unit, over all its KV heads: its accumulators stay in L2
constexpr int MOST_LANES = 192;  // where they are short: what is done once a tile is then done for more rows
constexpr int DIM_PADDING = 64;  // rows of scratch memory are padded to whole vectors of any kernel
constexpr int MAX_PARTS = 2;     // of a key, each with a scale of its own

enum class Dtype { f32, bf16, f16, i8, e4m3 };

constexpr bool is_code(Dtype dtype) { return dtype == Dtype::i8 || dtype == Dtype::e4m3; }

// What codes of 8 bits are multiplied by, one for each part of a vector, [blocks, heads, slots, parts].
struct Scales {
    const std::uint16_t* data;  // bf16
    std::int64_t block_stride, head_stride, slot_stride;
};

// The blocks of keys or of values of one layer, [blocks, heads, slots, dim]; strides in elements.
struct Cache {
    const void* data;
    std::int64_t block_stride, head_stride, slot_stride;
    Scales scales;  // where the elements are codes
};

// One call: all sequences of a step over one layer's cache.
struct Attention {
    Dtype dtype;   // of queries and outputs
    Dtype stored;  // of the cache: the same, or codes
    const void* query;  // [rows, heads, head_dim]
    std::int64_t query_row_stride, query_head_stride;
    Cache keys, values;
    int heads, kv_heads, head_dim, value_dim, block_size;
    int part_dims[MAX_PARTS];  // dims of each part of a key, together head_dim; a value is one part
    std::int64_t sequences;
    const std::int64_t* row_starts;    // [sequences + 1]: the rows of each sequence
    const std::int64_t* table_starts;  // [sequences + 1]: where each sequence's blocks begin in `tables`
    const std::int64_t* tables;        // block numbers
    const std::int64_t* first;         // [rows]: the first key a row sees
    const std::int64_t* last;          // [rows]: one past the last
    float scale;
    void* out;   // [rows, heads, value_dim], contiguous
    float* lse;  // [rows, heads]
    Soon soon;   // what is read behind the call

    int group() const { return heads / kv_heads; }
};

// Lanes [KV head, row, head], over keys [first_key, last_key) of their sequence. `heads` of the query share
// a KV head; the first of them is `first_head` of the first one.
struct Unit {
    std::int64_t sequence, first_row, rows;
    int first_head, heads, first_kv_head, kv_heads;
    std::int64_t first_key, last_key;
    std::int64_t first_tile;  // of the call's, in the order of its units

    int head_lanes() const { return static_cast<int>(rows) * heads; }
    int lanes() const { return kv_heads * head_lanes(); }
};

// Row and query head of a lane.
struct Place {
    std::int64_t row;
    int head;
};

inline Place place_of(const Attention& call, const Unit& unit, int lane) {
    const int kv_head = lane / unit.head_lanes(), rest = lane % unit.head_lanes();
    return {unit.first_row + rest / unit.heads,
            unit.first_head + kv_head * call.group() + rest % unit.heads};
}

// What a kernel leaves of a unit.
struct Partial {
    float* out;  // [lanes, padded(value_dim)], not normalised
    float* max;  // [lanes], in log2; -inf = no key seen
    float* sum;  // [lanes], of 2^(score - max)
};

// Memory of one thread for one unit; every part is aligned to 64 bytes.
struct Scratch {
    float* query;    // [lanes, query_room(call)]
    float* scores;   // [lanes of a KV head, TILE_KEYS]
    float* weights;  // [lanes of a KV head, TILE_KEYS]
    float* packed;   // [padded(head_dim), TILE_KEYS / 2] words: keys by pairs of dims
    float* paired;   // [padded(value_dim), TILE_KEYS / 2] words: values by pairs of keys
    float* sums;     // [padded(value_dim), lanes of a KV head, filled up to 16s]: outputs, dim by dim
    Partial partial;
};

constexpr int padded(int dim) { return (dim + DIM_PADDING - 1) / DIM_PADDING * DIM_PADDING; }

// Floats that have room for a query vector in the form that a kernel wants: over codes as much as four copies,
// in 16 bits, of parts that are each padded.
inline int query_room(const Attention& call) {
    return padded(call.head_dim) * (is_code(call.stored) ? 4 : 1);
}

using Kernel = void (*)(const Attention&, const Unit&, const Scratch&, const Partial&);

// Output and natural-log LSE of every row of a call, on at most `threads` threads.
void attend(const Attention& asked, Kernel kernel, int threads);

}  // namespace kvspan
