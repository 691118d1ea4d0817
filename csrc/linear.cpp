#include "linear.h"

#include <algorithm>

#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t CHUNK_ROWS = 240;  // whose input stays in a core's cache while panels go by
constexpr std::int64_t TASKS_PER_THREAD = 8;  // so that a thread which starts late still finds work
constexpr std::int64_t MOST_PANELS = 4;       // that are read in one run
constexpr std::int64_t RUN_ROWS = 16;         // of a weight: fewer are not worth a second thread

void take_row(const WeightRows& call, std::int64_t i) {
    const std::int64_t row = call.numbers[i] - call.first, pairs = (call.inputs + 1) / 2;
    auto* const out = static_cast<std::uint16_t*>(call.out) + i * call.inputs;
    if (row < 0 || row >= call.outputs) {
        std::fill_n(out, call.inputs, std::uint16_t{0});
        return;
    }
    const auto* const from = static_cast<const std::uint16_t*>(call.weight) +
                             2 * (row / LINEAR_PANEL * pairs * LINEAR_PANEL + row % LINEAR_PANEL);
    for (std::int64_t k = 0; k < call.inputs; ++k) out[k] = from[k / 2 * 2 * LINEAR_PANEL + k % 2];
}

}  // namespace

void multiply(const Linear& call, LinearKernel kernel, int threads) {
    const std::int64_t panels = call.panels();
    const std::int64_t chunks = (call.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const std::int64_t run =
        std::clamp<std::int64_t>(panels / (TASKS_PER_THREAD * threads), 1, MOST_PANELS);
    const std::int64_t runs = (panels + run - 1) / run;
    parallel_for(chunks * runs, threads, [&](std::int64_t i) {
        const std::int64_t row = i / runs * CHUNK_ROWS, first = i % runs * run;
        const std::int64_t rows = std::min(CHUNK_ROWS, call.rows - row);
        for (std::int64_t panel = first; panel < std::min(first + run, panels); ++panel) {
            kernel(call, {panel, row, rows});
        }
    });
}

void take_rows(const WeightRows& call, int threads) {
    parallel_for((call.count + RUN_ROWS - 1) / RUN_ROWS, threads, [&](std::int64_t run) {
        const std::int64_t stop = std::min(call.count, (run + 1) * RUN_ROWS);
        for (std::int64_t i = run * RUN_ROWS; i < stop; ++i) take_row(call, i);
    });
}

}  // namespace kvspan
