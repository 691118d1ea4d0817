// The blocked online softmax over a unit's keys, for any arithmetic. Each kernel file includes this once
// and is compiled for its own instruction set, so everything here has internal linkage and no standard
// library template is used: a copy of one that was compiled for a newer processor could be linked into
// another file.
//
// `Math` gives, with `Element` what the cache holds:
//     load_query   the unit's query vectors into scratch, in the form that `scores` wants
//     scores       [lanes, TILE_KEYS] = query . key, over one part of their dims
//     weigh        scratch.weights = 2^(score - max) of a lane; returns their sum, in WIDTH terms
//     accumulate   partial.out = partial.out * fade + weights . values
//     finish       brings partial.out in plain order of dims
//
// and may give a `Group`, which does all of that but `finish` for numbers of lanes that it `takes`.
//
// `scores` and `accumulate` ask now and then for rows of a tile behind theirs, see `Ahead`.
//
// Codes are never multiplied by their scales: a key's go on its scores, a value's on its weights.
#pragma once

#include <cstdint>

#include "attention.h"
#include "tiles.h"
#include "vectors.h"

namespace kvspan {
namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float MINUS_INFINITY = -__builtin_inff();

// Some dims of a key.
struct Part {
    int number, first, dims;
};

// Scores of a tile: of codes, those of each part, not yet times the key's scale for it.
template <class Math, class T>
inline void score(const Attention& call, int lanes, const Tile<T>& tile, Ahead<T>& ahead,
                  const Scratch& scratch) {
    if constexpr (!IS_CODE<T>) {
        Math::scores(call, lanes, tile, ahead, scratch, Part{0, 0, call.head_dim}, scratch.scores);
    } else {
        const Part first{0, 0, call.part_dims[0]}, second{1, call.part_dims[0], call.part_dims[1]};
        Math::scores(call, lanes, tile, ahead, scratch, first, scratch.scores);
        if (second.dims > 0) Math::scores(call, lanes, tile, ahead, scratch, second, scratch.weights);
    }
}

// Multiplies a lane's scores by the keys' scales and hides keys that it does not see; returns vectors'
// largest.
template <class T>
inline Vec settle(const Attention& call, const Tile<T>& tile, const Scratch& scratch, int lane,
                  std::uint64_t seen) {
    float* scores = scratch.scores + lane * TILE_KEYS;
    const float* others = scratch.weights + lane * TILE_KEYS;
    const bool parts = IS_CODE<T> && call.part_dims[1] > 0;
    Vec max = splat(MINUS_INFINITY);
    for (int i = 0; i < TILE_KEYS; i += WIDTH) {
        Vec v = load(scores + i);
        if constexpr (IS_CODE<T>) {
            v *= load(tile.key_scales[0] + i);
            if (parts) v += load(others + i) * load(tile.key_scales[1] + i);
            store(scores + i, v);
        }
        max = larger(v, max);
    }
    if (seen == ~std::uint64_t{0}) return max;
    for (int i = 0; i < TILE_KEYS; ++i) scores[i] = seen >> i & 1 ? scores[i] : MINUS_INFINITY;
    max = splat(MINUS_INFINITY);
    for (int i = 0; i < TILE_KEYS; i += WIDTH) max = larger(load(scores + i), max);
    return max;
}

// Raises a lane's largest score to those of a tile, and returns what earlier tiles are multiplied by.
// Most tiles raise it no more, so that it is compared before it is looked for.
inline float raise(Vec scores, float& max) {
    if (!any_above(scores, max)) return 1.0f;
    const float before = max;
    max = largest(scores);
    return exp2(splat(before - max))[0];
}

// One tile's scores become weights; `fade[lane]` is what earlier tiles are multiplied by. A lane's sum
// of exponentials stays in WIDTH terms, which are added up once, and not for every tile.
template <class Math, class T>
inline void soften(const Attention& call, const Unit& unit, const Tile<T>& tile, const Scratch& scratch,
                   float* max, Vec* sums, Ahead<T>& ahead, float* fade) {
    const float scale = call.scale * LOG2_E;
    const int lanes = unit.head_lanes();
    const int asked = ahead.left() / (3 * lanes);  // its share of the time left
    for (int lane = 0, row = 0; row < unit.rows; ++row) {
        const std::int64_t at = unit.first_row + row;
        const std::uint64_t seen = tile.seen & visible(call.first[at], call.last[at], tile.first);
        for (int head = 0; head < unit.heads; ++head, ++lane)
            fade[lane] = raise(settle(call, tile, scratch, lane, seen) * scale, max[lane]);
    }
    for (int lane = 0; lane < lanes; ++lane) {  // whose weights take the place of second parts' scores
        ahead.ask(asked);
        const float anchor = max[lane] == MINUS_INFINITY ? 0.0f : max[lane];
        sums[lane] = sums[lane] * fade[lane] + Math::weigh(tile, scratch, lane, scale, anchor);
    }
}

// A tile's weights, and their sums over values.
template <class Math, class T>
inline void take(const Attention& call, const Unit& unit, const Tile<T>& tile, Ahead<T>& ahead,
                 const Scratch& scratch, const Partial& partial, Vec* sums) {
    if constexpr (requires { typename Math::Group; }) {
        if (Math::Group::takes(call, unit.head_lanes()))
            return Math::Group::take(call, unit, tile, ahead, scratch, partial, sums);
    }
    const int lanes = unit.head_lanes();
    float fade[MOST_LANES];
    score<Math>(call, lanes, tile, ahead, scratch);
    soften<Math>(call, unit, tile, scratch, partial.max, sums, ahead, fade);
    Math::accumulate(call, lanes, tile, ahead, scratch, fade, partial.out);
}

// The part of scratch memory and of the result that belongs to one KV head of a unit.
inline Scratch scratch_of(const Attention& call, const Unit& unit, int head, Scratch scratch) {
    scratch.query += static_cast<std::int64_t>(head) * unit.head_lanes() * query_room(call);
    return scratch;
}

inline Partial partial_of(const Attention& call, const Unit& unit, int head, const Partial& partial) {
    const std::int64_t lane = static_cast<std::int64_t>(head) * unit.head_lanes();
    return {partial.out + lane * padded(call.value_dim), partial.max + lane, partial.sum + lane};
}

template <class Math>
void flash(const Attention& call, const Unit& unit, const Scratch& scratch, const Partial& partial) {
    using T = typename Math::Element;
    const int lanes = unit.head_lanes(), width = padded(call.value_dim);
    Vec sums[MOST_LANES];
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(unit.lanes()) * width; ++i) {
        partial.out[i] = 0.0f;
    }
    for (int lane = 0; lane < unit.lanes(); ++lane)
        partial.max[lane] = MINUS_INFINITY, sums[lane] = Vec{};
    for (int head = 0; head < unit.kv_heads; ++head)
        Math::load_query(call, unit, head * lanes, scratch_of(call, unit, head, scratch));

    Tiles<T> tiles(call, unit);
    const std::int64_t begin = unit.first_key / TILE_KEYS * TILE_KEYS;
    for (Step step{begin, 0}; step.key < unit.last_key; step = step.next(unit)) {
        tiles.advance();
        Tile<T>& tile = tiles.present();
        if constexpr (IS_CODE<T>) {
            if (step.head == 0) fetch_scales(call, unit, step.key + TILE_KEYS);
            if (tile.seen != 0) load_scales(call, unit.first_kv_head + step.head, tile);
        }
        if (tile.seen == 0) continue;
        const Scratch its_scratch = scratch_of(call, unit, step.head, scratch);
        const Partial its_partial = partial_of(call, unit, step.head, partial);
        const std::int64_t number = unit.first_tile + (step.key - begin) / TILE_KEYS;
        Ahead<T> ahead(call, tiles.later(), step.head == 0 ? call.soon.beside(number) : Memory{});
        take<Math>(call, unit, tile, ahead, its_scratch, its_partial, sums + step.head * lanes);
        while (ahead.left() > 0) ahead.ask(TILE_KEYS);
    }
    for (int lane = 0; lane < unit.lanes(); ++lane) partial.sum[lane] = sum(sums[lane]);
    Math::finish(call, unit, partial.out);
}

}  // namespace
}  // namespace kvspan
