// Cuts a call in units, runs them on threads, and merges what the kernels leave.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "narrow.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr float LN2 = 0.693147180559945309f;
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr std::int64_t MIN_SPLIT_KEYS = 128;  // under that, merging costs more than a thread saves
constexpr int SHORT_DIM = 128;                // of a value: 96 KiB for MOST_LANES
constexpr int UNITS_PER_THREAD = 4;           // so that threads which start late still find work

// Units that share their rows and differ in their keys: `splits` of them, from `first_unit` on.
struct Family {
    std::int64_t first_unit;
    int splits;
};

struct Plan {
    std::vector<Unit> units;
    std::vector<std::int64_t> family_of;  // of each unit
    std::vector<Family> families;
};

struct FreeAligned {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], FreeAligned>;

Floats allocate(std::size_t count) {
    return Floats(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t{64})));
}

// Memory that a thread keeps from call to call.
struct Arena {
    Floats floats;
    std::size_t size = 0;

    float* reserve(std::size_t count) {
        if (count > size) floats = allocate(size = count);
        return floats.get();
    }
};

std::size_t aligned_count(std::size_t floats) { return (floats + 15) / 16 * 16; }

std::size_t partial_size(const Attention& call, int lanes) {
    return static_cast<std::size_t>(lanes) * padded(call.value_dim) + 2 * aligned_count(lanes);
}

Partial partial_at(const Attention& call, int lanes, float* memory) {
    float* max = memory + static_cast<std::size_t>(lanes) * padded(call.value_dim);
    return {memory, max, max + aligned_count(lanes)};
}

Scratch scratch_for(const Attention& call, const Unit& unit, Arena& arena) {
    const int lanes = unit.lanes();
    const std::size_t query = static_cast<std::size_t>(lanes) * query_room(call);
    const std::size_t tile = static_cast<std::size_t>(unit.head_lanes()) * TILE_KEYS;
    const std::size_t packed = static_cast<std::size_t>(padded(call.head_dim)) * (TILE_KEYS / 2);
    const std::size_t paired = static_cast<std::size_t>(padded(call.value_dim)) * (TILE_KEYS / 2);
    const std::size_t sums = aligned_count(unit.head_lanes()) * padded(call.value_dim);
    float* memory = arena.reserve(query + 2 * tile + packed + paired + sums + partial_size(call, lanes));
    Scratch scratch{};
    scratch.query = memory;
    scratch.scores = scratch.query + query;
    scratch.weights = scratch.scores + tile;
    scratch.packed = scratch.weights + tile;
    scratch.paired = scratch.packed + packed;
    scratch.sums = scratch.paired + paired;
    scratch.partial = partial_at(call, lanes, scratch.sums + sums);
    return scratch;
}

// The keys that any of the unit's rows sees lie in this range.
void find_keys(const Attention& call, Unit& unit) {
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = 0;
    for (std::int64_t row = unit.first_row; row < unit.first_row + unit.rows; ++row) {
        if (call.last[row] <= call.first[row]) continue;
        first = std::min(first, call.first[row]);
        last = std::max(last, call.last[row]);
    }
    unit.first_key = std::min(first, last);
    unit.last_key = last;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Appends a unit of some rows for each block of heads.
void append_heads(const Attention& call, Unit unit, int heads, std::vector<Unit>& units) {
    const int group = call.group(), lanes = static_cast<int>(unit.rows) * heads;
    const int fitting = heads == group ? std::max(MAX_LANES / lanes, 1) : 1;
    const int kv_heads = ceil_div(call.kv_heads, ceil_div(call.kv_heads, fitting));
    for (int first = 0; first < call.kv_heads; first += kv_heads) {
        unit.first_kv_head = first;
        unit.kv_heads = std::min(kv_heads, call.kv_heads - first);
        for (int head = 0; head < group; head += heads) {
            unit.first_head = first * group + head;
            unit.heads = std::min(heads, group - head);
            units.push_back(unit);
        }
    }
}

// Lanes of a unit of many rows: so many that their accumulators are no more than those of SHORT_DIM dims.
int lanes_of_rows(const Attention& call) {
    return std::clamp(MOST_LANES * SHORT_DIM / padded(call.value_dim), MAX_LANES, MOST_LANES);
}

// One unit for each block of rows and heads, with all its keys; the blocks with most keys come first.
std::vector<Unit> whole_units(const Attention& call) {
    const int group = call.group(), heads = ceil_div(group, ceil_div(group, MAX_LANES));
    const std::int64_t block_rows = std::max(lanes_of_rows(call) / heads, 1);
    std::vector<Unit> units;
    for (std::int64_t s = 0; s < call.sequences; ++s) {
        const std::int64_t begin = call.row_starts[s], end = call.row_starts[s + 1];
        const std::int64_t blocks = (end - begin + block_rows - 1) / block_rows;
        for (std::int64_t block = blocks - 1; block >= 0; --block) {
            Unit unit{};
            unit.sequence = s;
            unit.first_row = begin + block * block_rows;
            unit.rows = std::min(block_rows, end - unit.first_row);
            find_keys(call, unit);
            append_heads(call, unit, heads, units);
        }
    }
    return units;
}

std::int64_t keys_of(const Unit& unit) { return unit.last_key - unit.first_key; }

double work_of(const Unit& unit) { return static_cast<double>(keys_of(unit)) * unit.lanes(); }

// Appends a unit in parts that differ in their keys, of which none does much more than `share`.
void append_split(Plan& plan, const Unit& whole, double share) {
    const auto most = std::max<std::int64_t>(keys_of(whole) / MIN_SPLIT_KEYS, 1);
    const auto splits = std::clamp<std::int64_t>(std::llround(work_of(whole) / share), 1, most);
    const auto tiles = (keys_of(whole) + splits * TILE_KEYS - 1) / (splits * TILE_KEYS);
    Family family{static_cast<std::int64_t>(plan.units.size()), 0};
    Unit unit = whole;
    do {
        unit.last_key = std::min(unit.first_key + tiles * TILE_KEYS, whole.last_key);
        plan.units.push_back(unit);
        plan.family_of.push_back(static_cast<std::int64_t>(plan.families.size()));
        unit.first_key = unit.last_key;
        ++family.splits;
    } while (unit.first_key < whole.last_key);
    plan.families.push_back(family);
}

// Numbers the tiles of all units, and says beside which of them what comes next is asked for: the last ones.
Soon spread_soon(Plan& plan) {
    std::int64_t tiles = 0;
    for (Unit& unit : plan.units) {
        unit.first_tile = tiles;
        tiles += (keys_of(unit) + TILE_KEYS - 1) / TILE_KEYS;
    }
    if (read_soon() == nullptr) return {};
    Soon soon{read_soon()->data(), read_soon()->size(), 0};
    soon.first_tile = std::max<std::int64_t>(tiles - soon.tiles(), 0);
    return soon;
}

// Units with so little work each that all threads end at about the same time.
Plan make_plan(const Attention& call, int threads) {
    const std::vector<Unit> wholes = whole_units(call);
    double total = 1;
    for (const Unit& unit : wholes) total += work_of(unit);
    Plan plan;
    for (const Unit& unit : wholes) {
        append_split(plan, unit, threads > 1 ? total / (threads * UNITS_PER_THREAD) : total);
    }
    return plan;
}

void store_row(const Attention& call, std::int64_t element, const float* row) {
    const int dim = call.value_dim;
    if (call.dtype == Dtype::f32) {
        std::memcpy(static_cast<float*>(call.out) + element, row, dim * sizeof(float));
        return;
    }
    auto* out = static_cast<std::uint16_t*>(call.out) + element;
    if (call.dtype == Dtype::bf16) {
        for (int d = 0; d < dim; ++d) out[d] = to_bf16(row[d]);
    } else {
        for (int d = 0; d < dim; ++d) out[d] = to_f16(row[d]);
    }
}

// Writes one lane's output and LSE from its partials: the softmax over all their keys. With a score that is NaN or
// infinite the sum of its partial is NaN, whatever the largest score is. Then the output is, too, and the LSE is the
// largest there is: whoever merges takes one that is not finite for that of no keys.
void finish_lane(const Attention& call, const Unit& unit, int lane, const Partial* partials, int count) {
    const int width = padded(call.value_dim);
    float max = NEG_INF, sum = 0;
    for (int i = 0; i < count; ++i) max = std::max(max, partials[i].max[lane]);
    float* row = partials[0].out + static_cast<std::int64_t>(lane) * width;
    for (int i = 0; i < count; ++i) {
        const float* other = partials[i].out + static_cast<std::int64_t>(lane) * width;
        const bool saw = partials[i].max[lane] != NEG_INF || std::isnan(partials[i].sum[lane]);
        const float weight = saw ? std::exp2(partials[i].max[lane] - max) : 0.0f;
        sum += saw ? weight * partials[i].sum[lane] : 0.0f;
        for (int d = 0; d < width; ++d) {
            row[d] = (i ? row[d] : 0.0f) + (saw ? weight * other[d] : 0.0f);
        }
    }
    const bool is_number = !std::isnan(sum), saw_none = max == NEG_INF && is_number;
    const float norm = saw_none ? 0.0f : 1.0f / sum;
    for (int d = 0; d < width; ++d) row[d] *= norm;
    const Place place = place_of(call, unit, lane);
    const std::int64_t at = place.row * call.heads + place.head;
    store_row(call, at * call.value_dim, row);
    call.lse[at] = saw_none ? NEG_INF : is_number ? max * LN2 + std::log(sum) : LARGEST;
}

void finish(const Attention& call, const Unit& unit, const Partial* partials, int count) {
    for (int lane = 0; lane < unit.lanes(); ++lane) finish_lane(call, unit, lane, partials, count);
}

}  // namespace

void attend(const Attention& asked, Kernel kernel, int threads) {
    Attention call = asked;
    Plan plan = make_plan(call, threads);
    call.soon = spread_soon(plan);
    std::size_t floats = 0;  // of the partials of units that are not alone
    std::vector<std::size_t> offsets(plan.units.size());
    std::vector<std::atomic<int>> unfinished(plan.families.size());
    for (std::size_t f = 0; f < plan.families.size(); ++f) {
        const Family& family = plan.families[f];
        unfinished[f] = family.splits;
        for (int i = 0; family.splits > 1 && i < family.splits; ++i) {
            offsets[family.first_unit + i] = floats;
            floats += partial_size(call, plan.units[family.first_unit].lanes());
        }
    }
    const Floats shared = allocate(std::max<std::size_t>(floats, 1));

    parallel_for(static_cast<std::int64_t>(plan.units.size()), threads, [&](std::int64_t i) {
        thread_local Arena arena;
        const Unit& unit = plan.units[i];
        const Family& family = plan.families[plan.family_of[i]];
        const Scratch scratch = scratch_for(call, unit, arena);
        if (family.splits == 1) {
            kernel(call, unit, scratch, scratch.partial);
            return finish(call, unit, &scratch.partial, 1);
        }
        kernel(call, unit, scratch, partial_at(call, unit.lanes(), shared.get() + offsets[i]));
        if (unfinished[plan.family_of[i]].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        std::vector<Partial> partials;  // the last one to end merges them all
        for (int k = 0; k < family.splits; ++k) {
            partials.push_back(
                partial_at(call, unit.lanes(), shared.get() + offsets[family.first_unit + k]));
        }
        finish(call, unit, partials.data(), family.splits);
    });
}

}  // namespace kvspan
