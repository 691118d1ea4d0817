#include "rows.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t RUN_ELEMENTS = 1 << 15;  // of input: less is not worth a second thread

template <class Call>
void run(const Call& call, std::int64_t row_elements, void (*kernel)(const Call&, std::int64_t),
         int threads) {
    const std::int64_t run_rows =
        std::max<std::int64_t>(RUN_ELEMENTS / std::max<std::int64_t>(row_elements, 1), 1);
    parallel_for((call.rows + run_rows - 1) / run_rows, threads, [&](std::int64_t i) {
        const std::int64_t stop = std::min(call.rows, (i + 1) * run_rows);
        for (std::int64_t row = i * run_rows; row < stop; ++row) kernel(call, row);
    });
}

}  // namespace

void run_rows(const RmsNorm& call, const RowKernels& kernels, int threads) {
    run(call, call.heads * call.size, kernels.rms_norm, threads);
}

void run_rows(const SiluMul& call, const RowKernels& kernels, int threads) {
    run(call, 2 * call.size, kernels.silu_mul, threads);
}

void run_rows(const Rotate& call, const RowKernels& kernels, int threads) {
    run(call, call.heads * (call.plain + call.dim), kernels.rotate, threads);
}

std::int64_t SideBySide::row_size() const {
    std::int64_t size = 0;
    for (const Part& part : parts) size += part.size;
    return size;
}

void run_rows(const SideBySide& call, int threads) {
    constexpr auto copy_row = [](const SideBySide& call, std::int64_t row) {
        std::byte* out = call.out + row * call.row_size();
        for (const SideBySide::Part& part : call.parts) {
            if (part.size > 0) std::memcpy(out, part.from + row * part.stride, part.size);
            out += part.size;
        }
    };
    run<SideBySide>(call, call.row_size(), copy_row, threads);
}

}  // namespace kvspan
