#include "linear.h"

#include <algorithm>

#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t RUN_BYTES = 1 << 17;  // of weights: what a thread takes at a time

}  // namespace

void multiply(const Linear& call, LinearKernel kernel, int threads) {
    const std::int64_t panel_bytes = LINEAR_PANEL * std::max<std::int64_t>(call.inputs, 1) * 2;
    const std::int64_t run = std::max<std::int64_t>(RUN_BYTES / panel_bytes, 1) * LINEAR_PANEL;
    parallel_for((call.outputs + run - 1) / run, threads, [&](std::int64_t i) {
        const std::int64_t stop = std::min(call.outputs, (i + 1) * run);
        for (std::int64_t first = i * run; first < stop; first += LINEAR_PANEL) {
            kernel(call, first, static_cast<int>(std::min<std::int64_t>(LINEAR_PANEL, stop - first)));
        }
    });
}

}  // namespace kvspan
