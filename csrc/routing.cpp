#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"

namespace kvspan {
namespace {

constexpr double TINY = 1e-20;           // beside a sum of weights that divides them
constexpr std::int64_t RUN_ROWS = 4;     // fewer are not worth a second thread
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// A thread's memory for a row.
struct Row {
    std::vector<float> scores, ranked;  // of experts
    std::vector<double> of_group;
    std::vector<int> order, group_order;

    explicit Row(const Routing& call)
        : scores(call.experts),
          ranked(call.experts),
          of_group(call.groups),
          order(call.experts),
          group_order(call.groups) {}
};

// The numbers [first, first + size) of the greatest `count` values come to the front, in order; what is
// not a number is greater than all that are.
template <class Value>
void rank(const std::vector<Value>& values, int* order, int first, int size, int count) {
    std::iota(order, order + size, first);
    std::partial_sort(order, order + count, order + size, [&](int a, int b) {
        const Value x = values[a], y = values[b];
        if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
        return x != y && !std::isnan(x) ? x > y : a < b;
    });
}

void score(const Routing& call, const float* logits, std::vector<float>& scores) {
    if (call.sigmoid) {
        std::transform(logits, logits + call.experts, scores.begin(), [](double x) {
            return static_cast<float>(1 / (1 + std::exp(-x)));
        });
        return;
    }
    const double largest = *std::max_element(logits, logits + call.experts);
    double total = 0;
    for (int i = 0; i < call.experts; ++i) total += std::exp(logits[i] - largest);
    for (int i = 0; i < call.experts; ++i) {
        scores[i] = static_cast<float>(std::exp(logits[i] - largest) / total);
    }
}

// Experts of groups that are not among the row's best are never picked.
void keep_best_groups(const Routing& call, Row& row) {
    const int size = call.experts / call.groups, counted = std::min(call.group_scores, size);
    for (int group = 0; group < call.groups; ++group) {
        rank(row.ranked, row.order.data(), group * size, size, counted);
        row.of_group[group] = 0;
        for (int i = 0; i < counted; ++i) row.of_group[group] += row.ranked[row.order[i]];
    }
    rank(row.of_group, row.group_order.data(), 0, call.groups, call.groups_per_row);
    for (int i = call.groups_per_row; i < call.groups; ++i) {
        std::fill_n(row.ranked.begin() + row.group_order[i] * size, size, NEVER);
    }
}

void route(const Routing& call, std::int64_t number, Row& row) {
    score(call, call.logits + number * call.experts, row.scores);
    for (int i = 0; i < call.experts; ++i) {
        row.ranked[i] = call.bias ? row.scores[i] + call.bias[i] : row.scores[i];
    }
    keep_best_groups(call, row);
    rank(row.ranked, row.order.data(), 0, call.experts, call.per_row);
    double total = 0;
    for (int i = 0; i < call.per_row; ++i) total += row.scores[row.order[i]];
    const double divisor = call.normalise ? total + TINY : 1.0;
    for (int i = 0; i < call.per_row; ++i) {
        const std::int64_t at = number * call.per_row + i;
        call.chosen[at] = row.order[i];
        call.weights[at] = static_cast<float>(row.scores[row.order[i]] / divisor * call.scale);
    }
}

}  // namespace

void find_experts(const Routing& call, int threads) {
    parallel_for((call.rows + RUN_ROWS - 1) / RUN_ROWS, threads, [&](std::int64_t run) {
        Row row(call);
        const std::int64_t stop = std::min(call.rows, (run + 1) * RUN_ROWS);
        for (std::int64_t number = run * RUN_ROWS; number < stop; ++number) route(call, number, row);
    });
}

}  // namespace kvspan
