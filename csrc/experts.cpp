#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "elements.h"
#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::int64_t RUN_PANELS = 4;        // that are read in one run
constexpr std::int64_t TASKS_PER_THREAD = 8;  // so that a thread which starts late still finds work
constexpr std::int64_t ASKED_BYTES = 2048;    // of what is read next; kernels ask for what is behind

// Rows that go to one expert are neighbours among all choices of rows.
struct Visited {
    std::int64_t expert, first, rows;
};

bool is_zeros(const void* row, std::int64_t size) {
    const auto* const from = static_cast<const std::uint16_t*>(row);
    return std::all_of(from, from + size, [](std::uint16_t bits) { return (bits & 0x7fff) == 0; });
}

// Choices of experts that are kept, expert by expert; of an expert, in order of rows. No expert is asked
// what it makes of zeros.
struct Plan {
    std::vector<std::int64_t> choices;  // row * per_row + place
    std::vector<Visited> experts;

    Plan(const Experts& experts, const Visits& call) {
        std::vector<std::int64_t> ends(experts.count + 1);
        const std::int64_t size = call.rows * call.per_row;
        std::vector<std::uint8_t> asks(call.rows);
        for (std::int64_t row = 0; row < call.rows; ++row) {
            const auto* const x = static_cast<const std::uint16_t*>(call.x) + row * call.row_stride;
            asks[row] = !is_zeros(x, experts.hidden);
        }
        const auto kept = [&](std::int64_t choice) {
            const std::int64_t expert = call.chosen[choice] - experts.first;
            return asks[choice / call.per_row] && expert >= 0 && expert < experts.count ? expert : -1;
        };
        for (std::int64_t i = 0; i < size; ++i) {
            if (kept(i) >= 0) ++ends[kept(i) + 1];
        }
        for (std::int64_t expert = 0; expert < experts.count; ++expert) {
            const std::int64_t rows = ends[expert + 1];
            if (rows > 0) this->experts.push_back({expert, ends[expert], rows});
            ends[expert + 1] += ends[expert];
        }
        choices.resize(ends[experts.count]);
        for (std::int64_t i = 0; i < size; ++i) {
            if (kept(i) >= 0) choices[ends[kept(i)]++] = i;
        }
    }
};

void gather(const Experts& experts, const Visits& call, const Plan& plan) {
    auto* to = static_cast<std::uint16_t*>(call.gathered);
    for (const std::int64_t choice : plan.choices) {
        const auto* from =
            static_cast<const std::uint16_t*>(call.x) + choice / call.per_row * call.row_stride;
        to = std::copy_n(from, experts.hidden, to);
    }
}

void make_inner(const Experts& experts, const Visits& call, const Plan& plan, int threads) {
    const std::int64_t panels = experts.gate_up_of(0).panels();
    const std::int64_t runs = (panels + RUN_PANELS - 1) / RUN_PANELS;
    const auto visited = static_cast<std::int64_t>(plan.experts.size());
    parallel_for(visited * runs, threads, [&](std::int64_t i) {
        const Visited& its = plan.experts[i / runs];
        Linear layer = experts.gate_up_of(its.expert);
        layer.input = static_cast<const std::uint16_t*>(call.gathered) + its.first * experts.hidden;
        layer.rows = its.rows;
        layer.out = static_cast<std::uint16_t*>(call.inner) + its.first * experts.some_inner;
        const std::int64_t first = i % runs * RUN_PANELS;
        for (std::int64_t panel = first; panel < std::min(first + RUN_PANELS, panels); ++panel) {
            experts.kernel(layer, {panel, 0, its.rows});
        }
    });
}

KVSPAN_CLONES void add_weighted(const float* from, std::int64_t size, float weight, float* to) {
    for (std::int64_t k = 0; k < size; ++k) to[k] += weight * from[k];
}

KVSPAN_CLONES void add_shared(const std::uint16_t* shared, std::int64_t size, float weight, float* to) {
    for (std::int64_t k = 0; k < size; ++k) to[k] += weight * AsBf16::widen(shared[k]);
}

KVSPAN_CLONES void round_all(const float* from, std::int64_t size, std::uint16_t* to) {
    for (std::int64_t k = 0; k < size; ++k) to[k] = AsBf16::round(from[k]);
}

const std::byte* panel_of(const Linear& layer, std::int64_t panel) {
    return static_cast<const std::byte*>(layer.weight) + panel * layer.panel_bytes();
}

void ask_for(const Linear& layer, std::int64_t panel) {
    const std::byte* const from = panel_of(layer, panel);
    for (std::int64_t i = 0; i < ASKED_BYTES; i += 64) __builtin_prefetch(from + i);
}

float share_of(const Visits& call, std::int64_t row) {
    if (!call.gate) return 1.0f;
    return 1.0f / (1.0f + std::exp(-AsBf16::widen(static_cast<const std::uint16_t*>(call.gate)[row])));
}

// Panels of outputs, of all rows: what each expert makes of its rows, weighed and added up.
void make_outputs(const Experts& experts, const Visits& call, const Plan& plan, std::int64_t first,
                  std::int64_t panels) {
    const std::int64_t column = first * LINEAR_PANEL;
    const std::int64_t width = std::min(panels * LINEAR_PANEL, experts.hidden - column);
    std::vector<float> sums(call.rows * width), made(call.rows * width);
    for (std::size_t i = 0; i < plan.experts.size(); ++i) {
        const Visited& its = plan.experts[i];
        if (i + 1 < plan.experts.size()) ask_for(experts.down_of(plan.experts[i + 1].expert), first);
        Linear layer = experts.down_of(its.expert);
        layer.weight = panel_of(layer, first);
        layer.outputs = width;
        layer.input = static_cast<const std::uint16_t*>(call.inner) + its.first * experts.some_inner;
        layer.rows = its.rows;
        layer.out = made.data();
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            experts.kernel(layer, {panel, 0, its.rows});
        }
        for (std::int64_t n = 0; n < its.rows; ++n) {
            const std::int64_t choice = plan.choices[its.first + n], row = choice / call.per_row;
            add_weighted(made.data() + n * width, width, call.weights[choice],
                         sums.data() + row * width);
        }
    }
    for (std::int64_t row = 0; row < call.rows; ++row) {
        float* const sum = sums.data() + row * width;
        const std::int64_t at = row * experts.hidden + column;
        if (call.shared) {
            add_shared(static_cast<const std::uint16_t*>(call.shared) + at, width, share_of(call, row),
                       sum);
        }
        round_all(sum, width, static_cast<std::uint16_t*>(call.out) + at);
    }
}

}  // namespace

Linear Experts::gate_up_of(std::int64_t expert) const {
    Linear layer{};
    layer.outputs = inner;
    layer.inputs = layer.input_stride = hidden;
    layer.panel_pairs = layer.pairs();
    layer.gated = true;
    const std::int64_t panel = expert * layer.panels() + first_inner / layer.panel_outputs();
    layer.weight = gate_up + panel * layer.panel_bytes();
    layer.outputs = some_inner;
    return layer;
}

Linear Experts::down_of(std::int64_t expert) const {
    Linear layer{};
    layer.outputs = hidden;
    layer.inputs = layer.input_stride = inner;
    layer.panel_pairs = layer.pairs();
    layer.wide = true;
    layer.weight =
        down + expert * layer.panels() * layer.panel_bytes() + first_inner / 2 * LINEAR_PANEL * 4;
    layer.inputs = layer.input_stride = some_inner;
    return layer;
}

void visit(const Experts& experts, const Visits& call, int threads) {
    const Plan plan(experts, call);
    gather(experts, call, plan);
    make_inner(experts, call, plan, threads);
    const std::int64_t panels = experts.down_of(0).panels();
    const std::int64_t run =
        std::clamp<std::int64_t>(panels / (TASKS_PER_THREAD * threads), 1, RUN_PANELS);
    parallel_for((panels + run - 1) / run, threads, [&](std::int64_t i) {
        make_outputs(experts, call, plan, i * run, std::min(run, panels - i * run));
    });
}

}  // namespace kvspan
