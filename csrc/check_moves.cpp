// What only moves elements or compares them: every bit has to be right.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "best.h"
#include "draw.h"
#include "check.h"

namespace kvspan::check {
namespace {

constexpr int CALLS = 200;

// A random call of one kind, and how many elements were wrong.
using Check = int (*)(Random&, int threads);

std::int64_t some_rows(Random& random) { return pick(random, 0, 9) ? pick(random, 0, 20) : 400; }

Bytes random_bytes(Random& random, std::int64_t count) {
    Bytes found(count);
    for (auto& byte : found) byte = static_cast<std::uint8_t>(pick(random, 0, 255));
    return found;
}

// Where element `input` of row `row` lies in panels.
std::int64_t in_panels(std::int64_t row, std::int64_t input, std::int64_t pairs) {
    const std::int64_t pair = row / LINEAR_PANEL * pairs + input / 2;
    return (pair * LINEAR_PANEL + row % LINEAR_PANEL) * 2 + input % 2;
}

// Rows of a part of a weight, some of them of other parts.
int rows_of_a_weight(Random& random, int threads) {
    const std::int64_t outputs = pick(random, 1, 100), inputs = pick(random, 1, 70);
    const std::int64_t first = pick(random, 0, 50);
    const std::int64_t panels = (outputs + LINEAR_PANEL - 1) / LINEAR_PANEL, pairs = (inputs + 1) / 2;
    const Bytes weight = random_bytes(random, panels * pairs * LINEAR_PANEL * 2 * 2);
    std::vector<std::int64_t> numbers(some_rows(random));
    for (auto& number : numbers) number = first + pick(random, -5, static_cast<int>(outputs) + 5);
    Bytes out(numbers.size() * inputs * 2);
    const WeightRows call{weight.data(),       outputs, inputs,    numbers.data(),
                          std::ssize(numbers), first,   out.data()};
    take_rows(call, threads);
    int wrong = 0;
    for (std::int64_t i = 0; i < std::ssize(out) / 2; ++i) {
        const std::int64_t row = numbers[i / inputs] - first;
        const bool is_there = row >= 0 && row < outputs;
        const std::uint8_t nothing[2] = {};
        const auto* wanted = is_there ? &weight[in_panels(row, i % inputs, pairs) * 2] : nothing;
        wrong += std::memcmp(&out[i * 2], wanted, 2) != 0;
    }
    return wrong;
}

int rows_side_by_side(Random& random, int threads) {
    SideBySide call{{}, some_rows(random), nullptr};
    std::vector<Bytes> memory;
    for (int i = pick(random, 1, 4); i > 0; --i) {
        const std::int64_t size = pick(random, 0, 40), stride = size + pick(random, 0, 3);
        memory.push_back(random_bytes(random, call.rows ? (call.rows - 1) * stride + size : 0));
        call.parts.push_back({reinterpret_cast<const std::byte*>(memory.back().data()), size, stride});
    }
    Bytes out(call.rows * call.row_size());
    call.out = reinterpret_cast<std::byte*>(out.data());
    run_rows(call, threads);
    int wrong = 0;
    std::int64_t at = 0;
    for (std::int64_t row = 0; row < call.rows; ++row) {
        for (std::size_t part = 0; part < memory.size(); ++part) {
            const auto& [from, size, stride] = call.parts[part];
            for (std::int64_t i = 0; i < size; ++i) wrong += out[at++] != memory[part][row * stride + i];
        }
    }
    return wrong;
}

// Few numbers, so that many are alike, and now and then a row that has a NaN, or nothing.
int largest_of_rows(Random& random, int threads) {
    const std::int64_t rows = some_rows(random);
    const std::int64_t size = pick(random, 0, 9) ? pick(random, 0, 300) : 3000;
    const std::int64_t stride = size + pick(random, 0, 3);
    std::vector<float> logits = numbers(random, rows ? (rows - 1) * stride + size : 0);
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    for (std::int64_t row = 0; row < rows && size; ++row) {
        float* const its = &logits[row * stride];
        if (pick(random, 0, 5) == 0) its[pick(random, 0, static_cast<int>(size) - 1)] = NAN;
        if (pick(random, 0, 5) == 0) std::fill_n(its, size, NOTHING);
    }
    std::vector<float> values(rows);
    std::vector<std::int64_t> places(rows);
    find_best({logits.data(), rows, stride, size, values.data(), places.data()}, threads);
    int wrong = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        float best = NOTHING;
        std::int64_t place = 0;
        for (std::int64_t i = 0; i < size && !std::isnan(best); ++i) {
            const float x = logits[row * stride + i];
            if (x > best || std::isnan(x)) best = x, place = std::isnan(x) ? 0 : i;
        }
        const bool same = std::isnan(best) ? std::isnan(values[row]) : values[row] == best;
        wrong += !same || places[row] != place;
    }
    return wrong;
}

// Sums, those of the first octaves, and where a running sum passes a goal, one weight at a time.
int drawing(Random& random, int threads) {
    const std::int64_t rows = some_rows(random), size = pick(random, 0, 1500), stride = size + 2;
    const std::vector<float> logits = numbers(random, rows * stride);
    const std::vector<double> greatest(rows, 2.0), temperature(rows, 0.5), least(rows, 0.0);
    const Weights call{logits.data(),   rows, stride, size, greatest.data(), temperature.data(),
                       least.data()};
    std::vector<double> whole(rows), sums(rows * OCTAVES), goals(rows), found;
    std::vector<std::int64_t> counts(rows * OCTAVES), last(rows, pick(random, 0, OCTAVES - 1));
    std::vector<std::int64_t> first(rows), places(rows), collected;
    totals(call, whole.data(), threads);
    octaves(call, sums.data(), counts.data(), threads);
    std::int64_t total = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        first[row] = total;
        for (int octave = 0; octave <= last[row]; ++octave) total += counts[row * OCTAVES + octave];
        goals[row] = pick(random, 0, 3) ? whole[row] * 0.4 : -1;
    }
    collected.resize(total), found.resize(total);
    collect(call, last.data(), first.data(), collected.data(), found.data(), threads);
    kvspan::pick(call, goals.data(), places.data(), threads);
    int wrong = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        std::int64_t place = -1, at = first[row];
        const std::int64_t end = row + 1 < rows ? first[row + 1] : total;
        for (std::int64_t i = 0; i < size; ++i) {
            const double weight = std::exp((static_cast<double>(logits[row * stride + i]) - 2.0) / 0.5);
            if (goals[row] >= 0 && sum <= goals[row]) place = i;
            sum += weight;
            if (at < end && collected[at] == i) wrong += std::abs(found[at++] / weight - 1) > 1e-12;
        }
        wrong += at != end || places[row] != place || std::abs(whole[row] - sum) > 1e-12 * sum;
    }
    return wrong;
}

}  // namespace

int check_moves() {
    const std::pair<const char*, Check> checks[] = {{"rows of a weight", rows_of_a_weight},
                                                    {"rows side by side", rows_side_by_side},
                                                    {"largest of rows", largest_of_rows},
                                                    {"drawing", drawing}};
    int bad = 0;
    for (const auto& [name, check] : checks) {
        Random random(7);
        int wrong = 0;
        for (int i = 0; i < CALLS; ++i) wrong += check(random, 1 + i % 3);
        bad += judge(name, wrong, 0);
    }
    return bad;
}

}  // namespace kvspan::check
