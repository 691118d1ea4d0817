// A panel of a linear layer's outputs on vectors of any width: bf16 becomes float32 by a shift, and a
// pair's two products are added one after the other.
#pragma once

#include "linear.h"
#include "vectors.h"

namespace kvspan {
namespace {

struct GenericLinear {
    static void panel(const Linear& call, const LinearTask& task) {
        const std::int64_t end = task.first_row + task.rows;
        for (std::int64_t row = task.first_row; row < end; row += MOST_ROWS) {
            const std::int64_t rows = end - row < MOST_ROWS ? end - row : MOST_ROWS;
            for (int at = 0; at < (call.gated ? LINEAR_PANEL / 2 : LINEAR_PANEL);
                 at += (call.gated ? 1 : VECTORS) * WIDTH) {
                BLOCKS[rows - 1](call, task.panel, row, at);
            }
        }
    }

private:
    static constexpr int MOST_ROWS = 4;
    static constexpr int VECTORS = 2;
    using Block = void (*)(const Linear&, std::int64_t panel, std::int64_t row, int at);

    template <int R>
    static void block(const Linear& call, std::int64_t panel, std::int64_t row, int at) {
        const auto* weight = static_cast<const std::uint32_t*>(call.weight) +
                             panel * call.panel_pairs * LINEAR_PANEL + at;
        const Bf16* input = static_cast<const Bf16*>(call.input) + row * call.input_stride;
        const int apart = call.gated ? LINEAR_PANEL / 2 : WIDTH;  // the two vectors of a block
        Vec sums[R][VECTORS] = {};
        for (std::int64_t k = 0; k < call.inputs; k += 2, weight += LINEAR_PANEL) {
            Vec low[VECTORS], high[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                Words both;
                std::memcpy(&both, weight + v * apart, sizeof both);
                low[v] = as_floats(both << 16);
                high[v] = as_floats(both & 0xffff0000u);
            }
            for (int r = 0; r < R; ++r) {
                const Bf16* x = input + r * call.input_stride + k;
                const Vec first = splat(widened(x[0]));
                const Vec second = splat(k + 1 < call.inputs ? widened(x[1]) : 0.0f);
                for (int v = 0; v < VECTORS; ++v) {
                    sums[r][v] += first * low[v];
                    sums[r][v] += second * high[v];
                }
            }
        }
        const std::int64_t first = panel * call.panel_outputs() + at;
        if (call.gated) {
            const Vec gate_bias = bias(call, call.bias, first);
            const Vec up_bias = bias(call, call.up_bias, first);
            for (int r = 0; r < R; ++r) {
                put(call, row + r, first, silu(sums[r][0] + gate_bias) * (sums[r][1] + up_bias));
            }
            return;
        }
        for (int v = 0; v < VECTORS; ++v) {
            const Vec more = bias(call, call.bias, first + v * WIDTH);
            for (int r = 0; r < R; ++r) put(call, row + r, first + v * WIDTH, sums[r][v] + more);
        }
    }

    // How many of the outputs from `first` on there are, WIDTH at the most.
    static int present(const Linear& call, std::int64_t first) {
        const std::int64_t left = call.outputs - first;
        return static_cast<int>(left < 0 ? 0 : left < WIDTH ? left : WIDTH);
    }

    static Vec bias(const Linear& call, const void* some, std::int64_t first) {
        if (!some) return Vec{};
        return load_up_to(static_cast<const Bf16*>(some) + first, present(call, first));
    }

    static void put(const Linear& call, std::int64_t row, std::int64_t first, Vec results) {
        const std::int64_t at = row * call.outputs + first;
        const int count = present(call, first);
        if (call.wide) return store_up_to(static_cast<float*>(call.out) + at, results, count);
        store_up_to(static_cast<Bf16*>(call.out) + at, results, count);
    }

    static float widened(Bf16 x) {
        const std::uint32_t bits = std::uint32_t{x.bits} << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    static constexpr Block BLOCKS[MOST_ROWS] = {block<1>, block<2>, block<3>, block<4>};
};

}  // namespace
}  // namespace kvspan
