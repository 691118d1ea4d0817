// Where the keys and values of a unit lie, tile by tile, and what is asked for ahead of their use. Knows
// no arithmetic but that of scales, which become floats here.
#pragma once

#include <cstdint>

#include "attention.h"
#include "vectors.h"

namespace kvspan {
namespace {

constexpr int EIGHT = 8;        // rows that are listed at a time

// Elements that need a scale.
template <class T>
constexpr bool IS_CODE = sizeof(T) == 1;

// From a request for rows to their use: memory that all cores ask is late. Codes are as many bytes ahead
// as other elements.
template <class T>
constexpr int STEPS_AHEAD = IS_CODE<T> ? 4 : 2;

// Slots of a block, side by side, that hold keys from a tile's `place`-th on.
struct Run {
    std::int64_t block, slot;
    int place, count;
};

// Where the keys and values of a tile lie. Places that no lane sees repeat one that some lane does see,
// so that whole tiles can be computed and an unused slot is never read.
template <class T>
struct Tile {
    alignas(64) const T* keys[TILE_KEYS + EIGHT];  // of which the last are room to write
    alignas(64) const T* values[TILE_KEYS + EIGHT];
    alignas(64) float key_scales[MAX_PARTS][TILE_KEYS];  // of codes
    alignas(64) float value_scales[TILE_KEYS];
    Run runs[TILE_KEYS];
    int num_runs;
    std::int64_t first;  // number of the tile's first key
    std::uint64_t seen;  // bit i: some lane sees key first + i
    int count;           // keys up to the last one seen
};

// The rows of memory that a later tile reads, asked for a few at a time while this one is worked on: at
// an even pace, for a processor has only so many requests under way, and waits when there are more. And
// lines that are read after the call, for who has time to ask for them, see `Soon`.
template <class T>
class Ahead {
public:
    Ahead(const Attention& call, const Tile<T>& next, const Memory& soon) {
        if (next.seen == 0) return;
        const T *key = next.keys[0], *value = next.values[0];
        const bool within = value >= key && value < key + call.head_dim;
        rows_ = next.keys, dims_ = call.head_dim, left_ = TILE_KEYS;
        if (!within) then_ = next.values, then_dims_ = call.value_dim;
        if (!within) return;  // keys and values apart are read for as long as they are multiplied
        soon_ = reinterpret_cast<const char*>(soon.begin);
        soon_lines_ = static_cast<int>(soon.bytes / LINE_BYTES);
    }

    // Rows not asked for yet: of keys, and of values unless those lie within keys.
    int left() const { return left_ + (then_ ? TILE_KEYS : 0); }

    KVSPAN_INLINE void ask(int rows) {
        if (left_ >= rows && dims_ <= LINE) {  // the usual case of codes, in few instructions
            for (int i = 0; i < rows; ++i) __builtin_prefetch(rows_[i], 0, 2);
        } else {
            rows = rows < left_ ? rows : left_;
            for (int i = 0; i < rows; ++i) {
                for (int d = 0; d < dims_; d += LINE) __builtin_prefetch(rows_[i] + d, 0, 2);
            }
        }
        rows_ += rows;
        left_ -= rows;
        if (left_ == 0 && then_) take_values();
    }

    // One line of a row, which is then taken up at the next one.
    KVSPAN_INLINE void ask_line() {
        if (left_ == 0) return;
        __builtin_prefetch(rows_[0] + dim_, 0, 2);
        dim_ += LINE;
        if (dim_ < dims_) return;
        dim_ = 0;
        ++rows_;
        if (--left_ == 0 && then_) take_values();
    }

    int soon_lines() const { return soon_lines_; }

    KVSPAN_INLINE void ask_soon_line() {
        if (soon_lines_ == 0) return;
        __builtin_prefetch(soon_, 0, 2);
        soon_ += LINE_BYTES;
        --soon_lines_;
    }

private:
    static constexpr int LINE_BYTES = 64, LINE = LINE_BYTES / static_cast<int>(sizeof(T));

    void take_values() {
        rows_ = then_, dims_ = then_dims_, left_ = TILE_KEYS;
        then_ = nullptr;
    }

    const T *const *rows_ = nullptr, *const *then_ = nullptr;  // then_: null = nothing
    int dims_ = 0, then_dims_ = 0, left_ = 0, dim_ = 0;
    const char* soon_ = nullptr;
    int soon_lines_ = 0;
};

// The keys first..last as bits of a tile that starts at `start`.
inline std::uint64_t visible(std::int64_t first, std::int64_t last, std::int64_t start) {
    const std::int64_t lo = first > start ? first - start : 0;
    const std::int64_t hi = last - start < TILE_KEYS ? last - start : TILE_KEYS;
    if (hi <= lo) return 0;
    const std::uint64_t below_hi = hi == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << hi) - 1;
    return below_hi & ~((std::uint64_t{1} << lo) - 1);
}

inline const std::uint16_t* scales_at(const Scales& scales, int kv_head, std::int64_t block,
                                      std::int64_t slot) {
    return scales.data + block * scales.block_stride + kv_head * scales.head_stride +
           slot * scales.slot_stride;
}

inline void widen(const std::uint16_t* from, std::int64_t stride, int count, float* to) {
    static_assert(sizeof(Bf16) == sizeof *from);
    int i = 0;
    for (; stride == 1 && i + WIDTH <= count; i += WIDTH)
        store(to + i, load(reinterpret_cast<const Bf16*>(from + i)));
    for (; i < count; ++i) {
        const std::uint32_t bits = static_cast<std::uint32_t>(from[i * stride]) << 16;
        __builtin_memcpy(to + i, &bits, sizeof bits);
    }
}

// Asks for the scales of a unit's keys in the tile that begins at `first`.
inline void fetch_scales(const Attention& call, const Unit& unit, std::int64_t first) {
    const std::int64_t* table = call.tables + call.table_starts[unit.sequence];
    const std::int64_t end = first + TILE_KEYS < unit.last_key ? first + TILE_KEYS : unit.last_key;
    std::int64_t column = first / call.block_size, slot = first % call.block_size;
    for (; column * call.block_size < end; ++column, slot = 0) {
        for (int head = unit.first_kv_head; head < unit.first_kv_head + unit.kv_heads; ++head) {
            __builtin_prefetch(scales_at(call.keys.scales, head, table[column], slot));
            __builtin_prefetch(scales_at(call.values.scales, head, table[column], slot));
        }
    }
}

// Fills the places that no lane sees with the first one that some lane does.
template <class T>
inline void fill_gaps(std::uint64_t seen, T* places) {
    const int anchor = __builtin_ctzll(seen);
    for (int i = 0; seen != ~std::uint64_t{0} && i < TILE_KEYS; ++i) {
        if (!(seen >> i & 1)) places[i] = places[anchor];
    }
}

// The scales of a tile.
template <class T>
inline void load_scales(const Attention& call, int kv_head, Tile<T>& tile) {
    const int parts = call.part_dims[1] > 0 ? 2 : 1;
    for (int i = 0; i < tile.num_runs; ++i) {
        const Run& run = tile.runs[i];
        const std::uint16_t* key = scales_at(call.keys.scales, kv_head, run.block, run.slot);
        const std::uint16_t* value = scales_at(call.values.scales, kv_head, run.block, run.slot);
        for (int part = 0; part < parts; ++part)
            widen(key + part, call.keys.scales.slot_stride, run.count,
                  tile.key_scales[part] + run.place);
        widen(value, call.values.scales.slot_stride, run.count, tile.value_scales + run.place);
    }
    for (int part = 0; part < parts; ++part) fill_gaps(tile.seen, tile.key_scales[part]);
    fill_gaps(tile.seen, tile.value_scales);
}

// The runs of slots that hold a tile's keys.
template <class T>
inline void find_runs(const Attention& call, const Unit& unit, Tile<T>& tile) {
    const std::int64_t* table = call.tables + call.table_starts[unit.sequence];
    std::int64_t column = tile.first / call.block_size, slot = tile.first % call.block_size;
    tile.num_runs = 0;
    for (int place = 0; place < tile.count; ++column, slot = 0) {
        const std::int64_t left = call.block_size - slot;
        const int count = left < tile.count - place ? static_cast<int>(left) : tile.count - place;
        tile.runs[tile.num_runs++] = {table[column], slot, place, count};
        place += count;
    }
}

// Where `count` rows are, `stride` apart, and some behind them.
template <class T>
inline void list_rows(const T* first, std::int64_t stride, int count, const T** to) {
    typedef std::uintptr_t Places __attribute__((vector_size(EIGHT * sizeof(std::uintptr_t))));
    const auto step = static_cast<std::uintptr_t>(stride) * sizeof(T);
    Places places = {0, step, 2 * step, 3 * step, 4 * step, 5 * step, 6 * step, 7 * step};
    places += reinterpret_cast<std::uintptr_t>(first);
    for (int i = 0; i < count; i += EIGHT, places += EIGHT * step)
        __builtin_memcpy(to + i, &places, sizeof places);
}

// Finds the tile that begins at key `first`, at the unit's first KV head.
template <class T>
inline void locate(const Attention& call, const Unit& unit, std::int64_t first, Tile<T>& tile) {
    tile.first = first;
    tile.seen = 0;
    for (std::int64_t row = unit.first_row; row < unit.first_row + unit.rows; ++row) {
        tile.seen |= visible(call.first[row], call.last[row], first);
    }
    tile.seen &= visible(unit.first_key, unit.last_key, first);
    if (tile.seen == 0) return;
    tile.count = 64 - __builtin_clzll(tile.seen);
    const T* keys = static_cast<const T*>(call.keys.data) + unit.first_kv_head * call.keys.head_stride;
    const T* values =
        static_cast<const T*>(call.values.data) + unit.first_kv_head * call.values.head_stride;
    find_runs(call, unit, tile);
    for (int r = 0; r < tile.num_runs; ++r) {
        const Run& run = tile.runs[r];
        const T* key = keys + run.block * call.keys.block_stride + run.slot * call.keys.slot_stride;
        const T* value =
            values + run.block * call.values.block_stride + run.slot * call.values.slot_stride;
        list_rows(key, call.keys.slot_stride, run.count, tile.keys + run.place);
        list_rows(value, call.values.slot_stride, run.count, tile.values + run.place);
    }
    fill_gaps(tile.seen, tile.keys);
    fill_gaps(tile.seen, tile.values);
}

// Makes `next` the same keys of the KV head behind a tile's.
template <class T>
inline void advance(const Attention& call, const Tile<T>& tile, Tile<T>& next) {
    for (int i = 0; i < TILE_KEYS; ++i) {
        next.keys[i] = tile.keys[i] + call.keys.head_stride;
        next.values[i] = tile.values[i] + call.values.head_stride;
    }
    next.first = tile.first;
    next.seen = tile.seen;
    next.count = tile.count;
    next.num_runs = tile.num_runs;
    for (int i = 0; i < tile.num_runs; ++i) next.runs[i] = tile.runs[i];
}

// A tile of one KV head.
struct Step {
    std::int64_t key;
    int head;

    Step next(const Unit& unit) const {
        return head + 1 < unit.kv_heads ? Step{key, head + 1} : Step{key + TILE_KEYS, 0};
    }
};

// The tiles of a step and of some behind it, in a ring.
template <class T>
class Tiles {
public:
    Tiles(const Attention& call, const Unit& unit) : call_(call), unit_(unit) {
        last_ = {unit.first_key / TILE_KEYS * TILE_KEYS, 0};
        for (auto& tile : tiles_) tile.seen = 0;
        for (int i = 0; i < STEPS_AHEAD<T>; ++i) prepare();
    }

    // Goes on by a step.
    void advance() {
        present_ = after(present_);
        prepare();
    }

    Tile<T>& present() { return tiles_[present_]; }

    // STEPS_AHEAD behind the present one.
    const Tile<T>& later() const { return tiles_[newest_]; }

private:
    static int after(int i) { return i == STEPS_AHEAD<T> ? 0 : i + 1; }

    void prepare() {
        const Tile<T>& before = tiles_[newest_];
        Tile<T>& tile = tiles_[newest_ = after(newest_)];
        tile.seen = 0;
        if (last_.key < unit_.last_key && last_.head == 0) locate(call_, unit_, last_.key, tile);
        if (last_.head > 0 && before.seen != 0) kvspan::advance(call_, before, tile);
        last_ = last_.next(unit_);
    }

    const Attention& call_;
    const Unit& unit_;
    Tile<T> tiles_[STEPS_AHEAD<T> + 1];
    Step last_;  // the next to be prepared
    int present_ = STEPS_AHEAD<T>, newest_ = STEPS_AHEAD<T>;
};

}  // namespace
}  // namespace kvspan
