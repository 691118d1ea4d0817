// Routing, routed experts and shares of attention against the same written out in double precision.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "experts.h"
#include "routing.h"
#include "share.h"

namespace kvspan::check {
namespace {

constexpr int CALLS = 60;

// Scores are of a few different logits, so that most are ties. 1 for each row that went elsewhere.
int routing(Random& random, int threads) {
    const int size = pick(random, 1, 9), groups = pick(random, 1, 5), experts = groups * size;
    const int of_row = pick(random, 1, groups), counted = pick(random, 1, 3);
    const std::int64_t rows = pick(random, 0, 20);
    const int per_row = pick(random, 1, of_row * size);
    const bool sigmoid = pick(random, 0, 1), normalise = pick(random, 0, 1);
    std::vector<float> logits(rows * experts), bias(experts), weights(rows * per_row);
    for (auto& x : logits) x = static_cast<float>(pick(random, -2, 2));
    for (auto& x : bias) x = static_cast<float>(pick(random, -1, 1)) / 4;
    std::vector<std::int64_t> chosen(rows * per_row);
    find_experts({logits.data(), rows, experts, bias.data(), sigmoid, groups, of_row, counted, per_row,
                  normalise, 2.5, chosen.data(), weights.data()},
                 threads);
    int wrong = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        const float* its = &logits[row * experts];
        double total = 0;
        for (int i = 0; i < experts; ++i) total += std::exp(double{its[i]});
        std::vector<float> scores(experts), ranked(experts);
        for (int i = 0; i < experts; ++i) {
            const double e = std::exp(double{its[i]});
            scores[i] = static_cast<float>(sigmoid ? e / (1 + e) : e / total);
            ranked[i] = scores[i] + bias[i];
        }
        std::vector<double> sums(groups);
        for (int group = 0; group < groups; ++group) {
            std::vector<float> best(ranked.begin() + group * size, ranked.begin() + (group + 1) * size);
            std::sort(best.rbegin(), best.rend());
            for (int i = 0; i < std::min(counted, size); ++i) sums[group] += best[i];
        }
        std::vector<int> in_order(groups), found;
        std::iota(in_order.begin(), in_order.end(), 0);
        std::stable_sort(in_order.begin(), in_order.end(), [&](int a, int b) { return sums[a] > sums[b]; });
        for (int i = 0; i < experts; ++i) {
            const auto end = in_order.begin() + of_row;
            if (std::find(in_order.begin(), end, i / size) != end) found.push_back(i);
        }
        std::stable_sort(found.begin(), found.end(), [&](int a, int b) { return ranked[a] > ranked[b]; });
        double divisor = 0;
        for (int i = 0; i < per_row; ++i) divisor += scores[found[i]];
        for (int i = 0; i < per_row; ++i) {
            const std::int64_t at = row * per_row + i;
            const double wanted = scores[found[i]] / (normalise ? divisor : 1.0) * 2.5;
            wrong += chosen[at] != found[i] || std::abs(weights[at] / wanted - 1) > 1e-6;
        }
    }
    return wrong;
}

// [outputs, inputs] of each expert -> panels; of a gated one, gates and ups of half as many in turn.
std::vector<float> panels_of(const std::vector<float>& weights, std::int64_t count, const Linear& layer) {
    const std::int64_t sums = layer.gated ? 2 * layer.outputs : layer.outputs, width = layer.panel_outputs();
    const std::int64_t size = layer.panels() * layer.panel_pairs * LINEAR_PANEL * 2;
    std::vector<float> packed(count * size);
    for (std::int64_t i = 0; i < count * sums * layer.inputs; ++i) {
        const std::int64_t expert = i / (sums * layer.inputs), n = i / layer.inputs % sums;
        const std::int64_t k = i % layer.inputs, output = n % layer.outputs;
        const std::int64_t place = output % width + (n >= layer.outputs ? width : 0);
        const std::int64_t pair = output / width * layer.panel_pairs + k / 2;
        packed[expert * size + (pair * LINEAR_PANEL + place) * 2 + k % 2] = weights[i];
    }
    return packed;
}

double dot(const float* a, const float* b, std::int64_t size) {
    return std::inner_product(a, a + size, b, 0.0);
}

double experts_error(Random& random, Isa isa, int threads) {
    Experts experts{};
    experts.first = pick(random, 0, 3), experts.count = pick(random, 1, 5);
    experts.hidden = pick(random, 1, 90), experts.inner = pick(random, 1, 70);
    experts.kernel = linear_kernel(isa);
    const std::int64_t hidden = experts.hidden, inner = experts.inner, rows = pick(random, 0, 20);
    const int all = static_cast<int>(experts.first + experts.count) + pick(random, 0, 3);
    const int per_row = pick(random, 1, all);
    const bool shared = pick(random, 0, 1), gated = shared && pick(random, 0, 1);
    auto gate_up = numbers(random, experts.count * 2 * inner * hidden);
    auto down = numbers(random, experts.count * hidden * inner);
    for (auto& x : gate_up) x /= 16;  // exact, and results of about unit size
    for (auto& x : down) x /= 16;
    const std::int64_t stride = hidden + pick(random, 0, 3);
    const auto x = numbers(random, rows == 0 ? 0 : (rows - 1) * stride + hidden);
    const auto more = numbers(random, rows * hidden), gate = numbers(random, rows);
    std::vector<std::int64_t> chosen;
    std::vector<float> weights;
    for (std::int64_t row = 0; row < rows; ++row) {
        std::vector<std::int64_t> order(all);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        chosen.insert(chosen.end(), order.begin(), order.begin() + per_row);
        for (int i = 0; i < per_row; ++i) weights.push_back(number(random));
    }
    const Bytes in = encoded(x, Dtype::bf16), added = encoded(more, Dtype::bf16);
    const Bytes of_gate = encoded(gate, Dtype::bf16);
    const Bytes first = encoded(panels_of(gate_up, experts.count, experts.gate_up_of(0)), Dtype::bf16);
    const Bytes second = encoded(panels_of(down, experts.count, experts.down_of(0)), Dtype::bf16);
    experts.gate_up = reinterpret_cast<const std::byte*>(first.data());
    experts.down = reinterpret_cast<const std::byte*>(second.data());
    Bytes gathered(rows * per_row * hidden * 2), between(rows * per_row * inner * 2), out(rows * hidden * 2);
    visit(experts,
          {in.data(), rows, stride, chosen.data(), weights.data(), per_row, shared ? added.data() : nullptr,
           gated ? of_gate.data() : nullptr, gathered.data(), between.data(), out.data()},
          threads);
    double worst = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        std::vector<double> wanted(hidden), size(hidden);
        const double share = gated ? 1 / (1 + std::exp(-gate[row])) : 1;
        for (std::int64_t k = 0; k < hidden && shared; ++k) wanted[k] = share * more[row * hidden + k];
        for (int i = 0; i < per_row; ++i) {
            const std::int64_t expert = chosen[row * per_row + i] - experts.first;
            if (expert < 0 || expert >= experts.count) continue;
            std::vector<float> made(inner);
            for (std::int64_t n = 0; n < inner; ++n) {
                const float* its = &gate_up[(expert * 2 * inner + n) * hidden];
                const double g = dot(its, &x[row * stride], hidden);
                const double up = dot(its + inner * hidden, &x[row * stride], hidden);
                made[n] = static_cast<float>(g / (1 + std::exp(-g)) * up);
            }
            for (std::int64_t k = 0; k < hidden; ++k) {
                const float* its = &down[(expert * hidden + k) * inner];
                const double weight = weights[row * per_row + i];
                wanted[k] += weight * dot(its, made.data(), inner);
                for (std::int64_t n = 0; n < inner; ++n) size[k] += std::abs(weight * its[n] * made[n]);
            }
        }
        for (std::int64_t k = 0; k < hidden; ++k) {  // sums cancel, and what is between is rounded
            const double off = decoded(out.data(), Dtype::bf16, row * hidden + k) - wanted[k];
            worst = worse(worst, std::abs(off) / (1 + std::abs(wanted[k]) + size[k]));
        }
    }
    return worst;
}

double share_error(Random& random, Dtype dtype) {
    const std::int64_t rows = pick(random, 0, 6), heads = pick(random, 1, 4), dim = pick(random, 1, 70);
    const int ranks = pick(random, 1, 5), rank = pick(random, 0, ranks - 1);
    auto out = numbers(random, rows * heads * dim), lse = numbers(random, ranks * rows * heads);
    for (auto& x : lse) x = pick(random, 0, 3) ? x : -INFINITY;
    const float* const its = lse.data() + rank * rows * heads;
    for (std::int64_t i = 0; i < rows * heads * dim; ++i) {
        if (std::isinf(its[i / dim])) out[i] = NAN;
    }
    std::vector<std::vector<std::int64_t>> numbers_of(ranks);
    std::vector<Piece> pieces;
    std::vector<double> wanted;
    for (int r = 0; r < ranks; ++r) {
        for (std::int64_t row = 0; row < rows; ++row) {
            if (pick(random, 0, 1)) numbers_of[r].push_back(row);
        }
        const std::int64_t first = pick(random, 0, static_cast<int>(heads * dim));
        const std::int64_t columns = pick(random, 0, static_cast<int>(heads * dim - first));
        const auto count = static_cast<std::int64_t>(numbers_of[r].size());
        const bool by_number = pick(random, 0, 1);
        pieces.push_back({by_number ? numbers_of[r].data() : nullptr, 0, count, first, columns});
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t row = by_number ? numbers_of[r][i] : i;
            for (std::int64_t column = first; column < first + columns; ++column) {
                const std::int64_t head = row * heads + column / dim;
                double total = 0;
                for (int other = 0; other < ranks; ++other) {
                    total += std::exp(double{lse[other * rows * heads + head]});
                }
                const double share = std::isinf(its[head]) ? 0 : std::exp(double{its[head]}) / total;
                wanted.push_back(share == 0 ? 0 : share * out[head * dim + column % dim]);
            }
        }
    }
    const Bytes partial = encoded(out, dtype);
    std::vector<float> weights((ranks + 2) * rows * heads), made(wanted.size());
    take_share({dtype, reinterpret_cast<const std::byte*>(partial.data()), rows, heads, dim, lse.data(),
                ranks, rank, pieces, weights.data(), made.data()});
    Bytes rounded(made.size() * (dtype == Dtype::f32 ? 4 : 2));
    round_to(dtype, made.data(), static_cast<std::int64_t>(made.size()),
             reinterpret_cast<std::byte*>(rounded.data()));
    double worst = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        worst = worse(worst, error_of(decoded(rounded.data(), dtype, static_cast<std::int64_t>(i)), wanted[i]));
    }
    return worst;
}

}  // namespace

int check_experts() {
    Random random(7);
    int wrong = 0, bad = 0;
    for (int i = 0; i < CALLS; ++i) wrong += routing(random, 1 + i % 3);
    bad += judge("routing", wrong, 0);
    for (const Isa isa : isas()) {
        double worst = 0;
        for (int i = 0; i < CALLS; ++i) worst = worse(worst, experts_error(random, isa, 1 + i % 3));
        bad += judge("experts " + name_of(isa), worst, bound_of(Dtype::bf16));
    }
    for (const Dtype dtype : FLOATS) {
        double worst = 0;
        for (int i = 0; i < CALLS; ++i) worst = worse(worst, share_error(random, dtype));
        bad += judge("shares of attention " + name_of(dtype), worst, bound_of(dtype));
    }
    return bad;
}

}  // namespace kvspan::check
