// Vectors on their way into a cache: what was to be written reads back, and nothing else has changed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "check.h"
#include "store.h"

namespace kvspan::check {
namespace {

constexpr int CALLS = 60;  // of each pair of dtypes
constexpr std::uint8_t UNTOUCHED = 0xab;

// Where a cache [blocks, heads, slots, dim] has what.
struct Shape {
    int blocks, heads, slots, dim, parts;

    std::int64_t vectors() const { return std::int64_t{blocks} * heads * slots; }
    std::int64_t at(std::int64_t slot, int head) const {
        return (slot / slots * heads + head) * slots + slot % slots;
    }
};

// By how much codes may miss an element, in parts of the largest of its part of the vector: half a step,
// and what a scale that is rounded down to bf16 takes from the largest itself.
double allowed(Dtype stored) { return (stored == Dtype::i8 ? 1.0 / 254 : 1.0 / 28) + 1.0 / 256; }

// The error of one part of a vector, in parts of what is allowed.
double code_error(const float* wanted, int dims, Dtype stored, const std::uint8_t* codes,
                  const std::uint16_t* scale) {
    double largest = 0, worst = 0;
    for (int d = 0; d < dims; ++d) largest = std::max<double>(largest, std::fabs(wanted[d]));
    for (int d = 0; d < dims; ++d) {
        const double found = decoded(codes, stored, d) * decoded(scale, Dtype::bf16, 0);
        const double off = std::fabs(found - wanted[d]);
        worst = worse(worst, largest == 0 ? off : off / (largest * allowed(stored)));
    }
    return worst;
}

bool is_untouched(const std::uint8_t* from, std::int64_t bytes) {
    return std::all_of(from, from + bytes, [](std::uint8_t byte) { return byte == UNTOUCHED; });
}

double worst_error(Random& random, Dtype dtype, Dtype stored, int threads) {
    const int width = dtype == Dtype::f32 ? 4 : 2, cell = is_code(stored) ? 1 : width;
    const int first = pick(random, 1, 140), second = pick(random, 0, 1) ? pick(random, 1, 70) : 0;
    const Shape shape{pick(random, 1, 9), pick(random, 1, 4), 8 * pick(random, 1, 4), first + second,
                      second > 0 ? 2 : 1};
    const std::int64_t rows = pick(random, 0, 5) ? pick(random, 1, 40) : 400;
    const std::int64_t head_stride = shape.dim + pick(random, 0, 3);
    const std::int64_t row_stride = shape.heads * head_stride + pick(random, 0, 3);
    const auto given =
        numbers(random, (rows - 1) * row_stride + (shape.heads - 1) * head_stride + shape.dim);
    const Bytes input = encoded(given, dtype);

    std::vector<std::int64_t> slots(shape.blocks * shape.slots), row_of(slots.size(), -1);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    std::vector<std::int64_t> blocks(rows, -1), offsets(rows, pick(random, 0, shape.slots - 1));
    for (std::int64_t row = 0, next = 0; row < rows; ++row) {
        if (next == std::ssize(slots) || pick(random, 0, 3) == 0) continue;  // another rank's
        blocks[row] = slots[next] / shape.slots;
        offsets[row] = slots[next] % shape.slots;
        row_of[slots[next++]] = row;
    }

    Bytes data(shape.vectors() * shape.dim * cell, UNTOUCHED);
    std::vector<std::uint16_t> scales(is_code(stored) ? shape.vectors() * shape.parts : 0);
    const std::int64_t dim = shape.dim, parts = shape.parts;
    store({.dtype = dtype,
           .rows = input.data(),
           .row_stride = row_stride,
           .head_stride = head_stride,
           .count = rows,
           .blocks = blocks.data(),
           .offsets = offsets.data(),
           .heads = shape.heads,
           .part_dims = {first, second},
           .stored = stored,
           .data = data.data(),
           .block_stride = shape.heads * shape.slots * dim,
           .slot_head_stride = shape.slots * dim,
           .slot_stride = dim,
           .scales = scales.data(),
           .scale_block_stride = shape.heads * shape.slots * parts,
           .scale_head_stride = shape.slots * parts,
           .scale_slot_stride = parts},
          threads);

    double worst = 0;
    for (std::int64_t slot = 0; slot < std::ssize(slots); ++slot) {
        for (int head = 0; head < shape.heads; ++head) {
            const std::int64_t at = shape.at(slot, head);
            const std::uint8_t* found = data.data() + at * dim * cell;
            if (row_of[slot] < 0) {
                worst = worse(worst, is_untouched(found, dim * cell) ? 0.0 : NAN);
                continue;
            }
            const std::int64_t from = row_of[slot] * row_stride + head * head_stride;
            if (!is_code(stored)) {
                const bool same = std::memcmp(found, input.data() + from * width, dim * width) == 0;
                worst = worse(worst, same ? 0.0 : NAN);
                continue;
            }
            const std::uint16_t* scale = scales.data() + at * parts;
            worst = worse(worst, code_error(&given[from], first, stored, found, scale));
            if (second == 0) continue;
            worst =
                worse(worst, code_error(&given[from + first], second, stored, found + first, scale + 1));
        }
    }
    return worst;
}

}  // namespace

int check_store() {
    int wrong = 0;
    for (const Dtype dtype : FLOATS) {
        for (const Dtype stored : {dtype, Dtype::i8, Dtype::e4m3}) {
            Random random(7);
            double worst = 0;
            for (int i = 0; i < CALLS; ++i) {
                worst = worse(worst, worst_error(random, dtype, stored, 1 + i % 3));
            }
            wrong +=
                judge("store " + name_of(dtype) + " as " + name_of(stored) + ", in parts of the bound",
                      worst, 1.0);
        }
    }
    return wrong;
}

}  // namespace kvspan::check
