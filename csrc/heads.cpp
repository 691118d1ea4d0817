#include "heads.h"

#include <algorithm>

#include "parallel.h"

namespace kvspan {
namespace {

void run(const HeadProduct& call, void (*kernel)(const HeadProduct&, const HeadTask&), int piece,
         int threads) {
    const std::int64_t pieces = (call.outputs + piece - 1) / piece;
    const std::int64_t chunks = (call.rows + HEAD_ROWS - 1) / HEAD_ROWS;
    parallel_for(call.heads * pieces * chunks, threads, [&](std::int64_t i) {
        const int first = static_cast<int>(i / chunks % pieces) * piece;
        const std::int64_t row = i % chunks * HEAD_ROWS;  // runs fastest: chunks share what was read
        kernel(call, {.head = static_cast<int>(i / chunks / pieces),
                      .first = first,
                      .outputs = std::min(piece, call.outputs - first),
                      .rows = static_cast<int>(std::min<std::int64_t>(HEAD_ROWS, call.rows - row)),
                      .row = row});
    });
}

}  // namespace

void sum_rows(const HeadProduct& call, const HeadKernels& kernels, int threads) {
    run(call, kernels.sums, SUMMED_PIECE, threads);
}

void dot_rows(const HeadProduct& call, const HeadKernels& kernels, int threads) {
    run(call, kernels.dots, DOTTED_PIECE, threads);
}

}  // namespace kvspan
