#include "draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "elements.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t BLOCK = 512;  // weights made at once; they stay in the nearest cache

// e^x for x <= 0, to an ulp or two; 0 below -708, where doubles end.
KVSPAN_INLINE double exp_of_double(double x) {
    const double clamped = x > -708.0 ? x : -708.0;
    const double shifted = clamped * 0x1.71547652b82fep+0 + 0x1.8p52;  // rounds; fills the low bits
    const double n = shifted - 0x1.8p52;
    const double r =
        (clamped - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // |r| <= ln(2) / 2
    double y = 1.0 / 479001600.0;                                          // 1 / k!, k = 12 .. 0
    y = y * r + 1.0 / 39916800.0;
    y = y * r + 1.0 / 3628800.0;
    y = y * r + 1.0 / 362880.0;
    y = y * r + 1.0 / 40320.0;
    y = y * r + 1.0 / 5040.0;
    y = y * r + 1.0 / 720.0;
    y = y * r + 1.0 / 120.0;
    y = y * r + 1.0 / 24.0;
    y = y * r + 1.0 / 6.0;
    y = y * r + 0.5;
    y = y * r + 1.0;
    y = y * r + 1.0;
    const double scaled = std::bit_cast<double>(std::bit_cast<std::uint64_t>(y) +
                                                (std::bit_cast<std::uint64_t>(shifted) << 52));
    return x > -708.0 ? scaled : 0.0;
}

KVSPAN_CLONES void make_weights(const float* logits, std::int64_t size, double greatest,
                                double temperature, double least, double* out) {
    for (std::int64_t i = 0; i < size; ++i) {
        const double weight = exp_of_double((static_cast<double>(logits[i]) - greatest) / temperature);
        out[i] = weight < least ? 0.0 : weight;
    }
}

KVSPAN_CLONES double sum_of(const double* x, std::int64_t size) {
    double lanes[8] = {};
    for (std::int64_t i = 0; i + 8 <= size; i += 8)
        for (int lane = 0; lane < 8; ++lane) lanes[lane] += x[i + lane];
    for (std::int64_t i = size - size % 8; i < size; ++i) lanes[0] += x[i];
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return sum;
}

KVSPAN_CLONES bool has(const double* x, std::int64_t size, double least) {
    int found = 0;
    for (std::int64_t i = 0; i < size; ++i) found |= x[i] >= least;
    return found;
}

// The octave of a weight in [0, 1]: of 0 one behind the last.
KVSPAN_INLINE std::int64_t octave_of(double weight) {
    const auto below = 1023 - static_cast<std::int64_t>(std::bit_cast<std::uint64_t>(weight) >> 52);
    return weight > 0 ? std::min<std::int64_t>(below, OCTAVES - 1) : OCTAVES;
}

// Calls `each(weights, first place, how many)` for a row's blocks in order, until it returns false.
template <class Each>
void over_blocks(const Weights& call, std::int64_t row, Each each) {
    const float* const logits = call.logits + row * call.stride;
    double weights[BLOCK];
    for (std::int64_t start = 0; start < call.size; start += BLOCK) {
        const std::int64_t size = std::min(BLOCK, call.size - start);
        make_weights(logits + start, size, call.greatest[row], call.temperature[row], call.least[row],
                     weights);
        if (!each(weights, start, size)) return;
    }
}

}  // namespace

void totals(const Weights& call, double* sums, int threads) {
    parallel_for(call.rows, threads, [&](std::int64_t row) {
        double sum = 0;
        over_blocks(call, row, [&](const double* weights, std::int64_t, std::int64_t size) {
            sum += sum_of(weights, size);
            return true;
        });
        sums[row] = sum;
    });
}

void octaves(const Weights& call, double* sums, std::int64_t* counts, int threads) {
    parallel_for(call.rows, threads, [&](std::int64_t row) {
        // Two of each, taken in turn: neighbours are often of one octave, and would wait for each other.
        double sum[2][OCTAVES + 1] = {};
        std::int64_t count[2][OCTAVES + 1] = {};
        over_blocks(call, row, [&](const double* weights, std::int64_t, std::int64_t size) {
            for (std::int64_t i = 0; i < size; ++i) {
                const std::int64_t octave = octave_of(weights[i]);
                sum[i % 2][octave] += weights[i];
                ++count[i % 2][octave];
            }
            return true;
        });
        for (int octave = 0; octave < OCTAVES; ++octave) {
            sums[row * OCTAVES + octave] = sum[0][octave] + sum[1][octave];
            counts[row * OCTAVES + octave] = count[0][octave] + count[1][octave];
        }
    });
}

void collect(const Weights& call, const std::int64_t* last, const std::int64_t* first,
             std::int64_t* places, double* weights, int threads) {
    parallel_for(call.rows, threads, [&](std::int64_t row) {
        // Of octaves 0 .. i the least is 2^-i, and of all of them the least that is more than 0.
        const double least = last[row] < OCTAVES - 1 ? std::ldexp(1.0, -static_cast<int>(last[row]))
                                                     : std::numeric_limits<double>::min();
        std::int64_t at = first[row];
        over_blocks(call, row, [&](const double* made, std::int64_t start, std::int64_t size) {
            if (!has(made, size, least)) return true;
            for (std::int64_t i = 0; i < size; ++i) {
                if (made[i] < least) continue;
                places[at] = start + i, weights[at] = made[i], ++at;
            }
            return true;
        });
    });
}

void pick(const Weights& call, const double* goals, std::int64_t* places, int threads) {
    parallel_for(call.rows, threads, [&](std::int64_t row) {
        std::int64_t last = -1;
        double before = 0;
        if (goals[row] >= 0) {
            over_blocks(call, row, [&](const double* weights, std::int64_t start, std::int64_t size) {
                const double behind = before + sum_of(weights, size);
                if (behind > goals[row]) {
                    for (std::int64_t i = 0; i < size && before <= goals[row]; ++i)
                        if (weights[i] > 0) before += weights[i], last = start + i;
                    return false;
                }
                for (std::int64_t i = size; behind > before && i-- > 0;)
                    if (weights[i] > 0) before = behind, last = start + i;
                return true;
            });
        }
        places[row] = last;
    });
}

}  // namespace kvspan
