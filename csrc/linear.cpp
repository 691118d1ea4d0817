#include "linear.h"

#include <algorithm>

#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t CHUNK_ROWS = 240;  // whose input stays in a core's cache while panels go by
constexpr std::int64_t TASKS_PER_THREAD = 8;  // so that a thread which starts late still finds work
constexpr std::int64_t MOST_PANELS = 4;       // that are read in one run

}  // namespace

void multiply(const Linear& call, LinearKernel kernel, int threads) {
    const std::int64_t panels = call.panels();
    const std::int64_t chunks = (call.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const std::int64_t run = std::clamp<std::int64_t>(panels / (TASKS_PER_THREAD * threads), 1, MOST_PANELS);
    const std::int64_t runs = (panels + run - 1) / run;
    parallel_for(chunks * runs, threads, [&](std::int64_t i) {
        const std::int64_t row = i / runs * CHUNK_ROWS, first = i % runs * run;
        const std::int64_t rows = std::min(CHUNK_ROWS, call.rows - row);
        for (std::int64_t panel = first; panel < std::min(first + run, panels); ++panel) {
            kernel(call, {panel, row, rows});
        }
    });
}

}  // namespace kvspan
