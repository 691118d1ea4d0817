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

// A way to experts, and a row's as it is found by sorting: the first of equal ones stays the first.
struct Way {
    int size, groups, of_row, counted, per_row;
    bool sigmoid, normalise;

    explicit Way(Random& random)
        : size(pick(random, 1, 9)),
          groups(pick(random, 1, 5)),
          of_row(pick(random, 1, groups)),
          counted(pick(random, 1, 3)),
          per_row(pick(random, 1, of_row * size)),
          sigmoid(pick(random, 0, 1)),
          normalise(pick(random, 0, 1)) {}

    int experts() const { return groups * size; }

    std::vector<float> scores(const float* logits) const {
        std::vector<double> powers(experts());
        for (int i = 0; i < experts(); ++i) powers[i] = std::exp(double{logits[i]});
        const double total = std::accumulate(powers.begin(), powers.end(), 0.0);
        std::vector<float> found;
        for (const double power : powers) {
            found.push_back(static_cast<float>(power / (sigmoid ? 1 + power : total)));
        }
        return found;
    }

    std::vector<int> chosen(const std::vector<float>& ranked) const {
        std::vector<double> sums(groups);
        for (int group = 0; group < groups; ++group) {
            std::vector<float> best(ranked.begin() + group * size, ranked.begin() + (group + 1) * size);
            std::sort(best.rbegin(), best.rend());
            for (int i = 0; i < std::min(counted, size); ++i) sums[group] += best[i];
        }
        const std::vector<int> best = in_order(sums);
        std::vector<int> found;
        for (const int expert : in_order(ranked)) {
            const auto end = best.begin() + of_row;
            if (std::find(best.begin(), end, expert / size) != end) found.push_back(expert);
        }
        return found;
    }

    template <class Value>
    static std::vector<int> in_order(const std::vector<Value>& values) {
        std::vector<int> order(values.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return values[a] > values[b]; });
        return order;
    }
};

// Logits and biases are few different numbers, so that most scores are ties. How many choices are wrong.
int wrong_choices(Random& random, int threads) {
    const Way way(random);
    const std::int64_t rows = pick(random, 0, 20);
    std::vector<float> logits(rows * way.experts()), bias(way.experts()), weights(rows * way.per_row);
    for (auto& x : logits) x = static_cast<float>(pick(random, -2, 2));
    for (auto& x : bias) x = static_cast<float>(pick(random, -1, 1)) / 4;
    std::vector<std::int64_t> chosen(rows * way.per_row);
    find_experts({logits.data(), rows, way.experts(), bias.data(), way.sigmoid, way.groups, way.of_row,
                  way.counted, way.per_row, way.normalise, 2.5, chosen.data(), weights.data()},
                 threads);
    int wrong = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::vector<float> scores = way.scores(&logits[row * way.experts()]);
        std::vector<float> ranked = scores;
        for (int i = 0; i < way.experts(); ++i) ranked[i] += bias[i];
        const std::vector<int> wanted = way.chosen(ranked);
        double divisor = way.normalise ? 0 : 1;
        for (int i = 0; i < way.per_row && way.normalise; ++i) divisor += scores[wanted[i]];
        for (int i = 0; i < way.per_row; ++i) {
            const std::int64_t at = row * way.per_row + i;
            const double weight = scores[wanted[i]] / divisor * 2.5;
            wrong += chosen[at] != wanted[i] || std::abs(weights[at] / weight - 1) > 1e-6;
        }
    }
    return wrong;
}

// [outputs, inputs] of each expert -> panels; of a gated one, gates and ups of half as many in turn.
std::vector<float> panels_of(const std::vector<float>& weights, std::int64_t count,
                             const Linear& layer) {
    const std::int64_t sums = layer.gated ? 2 * layer.outputs : layer.outputs;
    const std::int64_t width = layer.panel_outputs();
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

// Experts of which some are kept, and rows for them.
struct Mixture {
    std::int64_t first, count, hidden, inner, first_inner, some_inner, rows, stride;
    int per_row;
    bool shared, gated;
    std::vector<float> gate_up, down, x, more, gate, weights;
    std::vector<std::int64_t> chosen;

    explicit Mixture(Random& random)
        : first(pick(random, 0, 3)),
          count(pick(random, 1, 5)),
          hidden(pick(random, 1, 90)),
          inner(pick(random, 1, 70)),
          first_inner(pick(random, 0, 1) && inner > LINEAR_PANEL ? LINEAR_PANEL : 0),
          some_inner(inner - first_inner > LINEAR_PANEL && pick(random, 0, 1) ? LINEAR_PANEL
                                                                              : inner - first_inner),
          rows(pick(random, 0, 20)),
          stride(hidden + pick(random, 0, 3)),
          shared(pick(random, 0, 1)),
          gated(shared && pick(random, 0, 1)),
          gate_up(numbers(random, count * 2 * inner * hidden)),
          down(numbers(random, count * hidden * inner)),
          x(numbers(random, rows == 0 ? 0 : (rows - 1) * stride + hidden)),
          more(numbers(random, rows * hidden)),
          gate(numbers(random, rows)) {
        for (auto& weight : gate_up) weight /= 16;  // exact, and results of about unit size
        for (auto& weight : down) weight /= 16;
        std::vector<std::int64_t> order(first + count + pick(random, 0, 3));
        std::iota(order.begin(), order.end(), 0);
        per_row = pick(random, 1, static_cast<int>(order.size()));
        for (std::int64_t row = 0; row < rows; ++row) {
            std::shuffle(order.begin(), order.end(), random);
            chosen.insert(chosen.end(), order.begin(), order.begin() + per_row);
        }
        weights = numbers(random, rows * per_row);
    }
};

// [rows, hidden] bf16, as the operator makes it.
Bytes visited(const Mixture& m, Isa isa, int threads) {
    const LinearKernel kernel = linear_kernel(isa);
    Experts experts{m.first, m.count, m.hidden, m.inner, 0, m.inner, nullptr, nullptr, kernel};
    const Bytes gate_up = encoded(panels_of(m.gate_up, m.count, experts.gate_up_of(0)), Dtype::bf16);
    const Bytes down = encoded(panels_of(m.down, m.count, experts.down_of(0)), Dtype::bf16);
    experts.first_inner = m.first_inner;
    experts.some_inner = m.some_inner;
    experts.gate_up = reinterpret_cast<const std::byte*>(gate_up.data());
    experts.down = reinterpret_cast<const std::byte*>(down.data());
    const Bytes x = encoded(m.x, Dtype::bf16), more = encoded(m.more, Dtype::bf16);
    const Bytes gate = encoded(m.gate, Dtype::bf16);
    const std::int64_t choices = m.rows * m.per_row;
    Bytes gathered(choices * m.hidden * 2), inner(choices * m.some_inner * 2);
    Bytes out(m.rows * m.hidden * 2);
    const Visits call{x.data(),
                      m.rows,
                      m.stride,
                      m.chosen.data(),
                      m.weights.data(),
                      m.per_row,
                      m.shared ? more.data() : nullptr,
                      m.gated ? gate.data() : nullptr,
                      gathered.data(),
                      inner.data(),
                      out.data()};
    visit(experts, call, threads);
    return out;
}

// silu(gate) * up of a kept expert and a row, as far as it is used.
std::vector<float> inner_of(const Mixture& m, std::int64_t expert, std::int64_t row) {
    std::vector<float> made;
    for (std::int64_t n = 0; n < m.inner; ++n) {
        const float* const weight = &m.gate_up[(expert * 2 * m.inner + n) * m.hidden];
        const double gate = dot(weight, &m.x[row * m.stride], m.hidden);
        const double up = dot(weight + m.inner * m.hidden, &m.x[row * m.stride], m.hidden);
        const bool used = n >= m.first_inner && n < m.first_inner + m.some_inner;
        made.push_back(used ? static_cast<float>(gate / (1 + std::exp(-gate)) * up) : 0.0f);
    }
    return made;
}

// Errors are in parts of what is summed up: sums cancel, and what is between two products is rounded.
double experts_error(Random& random, Isa isa, int threads) {
    const Mixture m(random);
    const Bytes out = visited(m, isa, threads);
    double worst = 0;
    for (std::int64_t row = 0; row < m.rows; ++row) {
        std::vector<double> wanted(m.hidden), size(m.hidden, 1.0);
        const double share = !m.shared ? 0 : m.gated ? 1 / (1 + std::exp(-m.gate[row])) : 1;
        for (std::int64_t k = 0; k < m.hidden; ++k) wanted[k] = share * m.more[row * m.hidden + k];
        for (int i = 0; i < m.per_row; ++i) {
            const std::int64_t choice = row * m.per_row + i, expert = m.chosen[choice] - m.first;
            if (expert < 0 || expert >= m.count) continue;
            const std::vector<float> inner = inner_of(m, expert, row);
            for (std::int64_t k = 0; k < m.hidden; ++k) {
                const float* const weight = &m.down[(expert * m.hidden + k) * m.inner];
                wanted[k] += m.weights[choice] * dot(weight, inner.data(), m.inner);
                for (std::int64_t n = 0; n < m.inner; ++n) {
                    size[k] += std::abs(m.weights[choice] * weight[n] * inner[n]);
                }
            }
        }
        for (std::int64_t k = 0; k < m.hidden; ++k) {
            const double found = decoded(out.data(), Dtype::bf16, row * m.hidden + k);
            worst = worse(worst, std::abs(found - wanted[k]) / (std::abs(wanted[k]) + size[k]));
        }
    }
    return worst;
}

// Partial attention of several ranks, of which one takes its share; NaN where it saw no key.
struct Shards {
    std::int64_t rows, heads, dim;
    int ranks, rank;
    std::vector<float> out, lse;

    explicit Shards(Random& random)
        : rows(pick(random, 0, 6)),
          heads(pick(random, 1, 4)),
          dim(pick(random, 1, 70)),
          ranks(pick(random, 1, 5)),
          rank(pick(random, 0, ranks - 1)),
          out(numbers(random, rows * heads * dim)),
          lse(numbers(random, ranks * rows * heads)) {
        for (auto& x : lse) x = pick(random, 0, 3) ? x : -INFINITY;
        for (std::int64_t i = 0; i < rows * heads * dim; ++i) {
            if (std::isinf(lse_of(rank, i / dim))) out[i] = NAN;
        }
    }

    float lse_of(int its_rank, std::int64_t head) const { return lse[its_rank * rows * heads + head]; }

    double share(std::int64_t row, std::int64_t column) const {
        const std::int64_t head = row * heads + column / dim;
        if (std::isinf(lse_of(rank, head))) return 0;
        double total = 0;
        for (int other = 0; other < ranks; ++other) total += std::exp(double{lse_of(other, head)});
        return std::exp(double{lse_of(rank, head)}) / total * out[row * heads * dim + column];
    }
};

double share_error(Random& random, Dtype dtype) {
    const Shards shards(random);
    const int width = static_cast<int>(shards.heads * shards.dim);
    std::vector<std::vector<std::int64_t>> by_number(shards.ranks);
    std::vector<Piece> pieces;
    std::vector<double> wanted;
    for (auto& rows : by_number) {
        for (std::int64_t row = 0; row < shards.rows; ++row) {
            if (pick(random, 0, 1)) rows.push_back(row);
        }
        const bool named = pick(random, 0, 1);
        const int first = pick(random, 0, width), columns = pick(random, 0, width - first);
        const auto count = static_cast<std::int64_t>(rows.size());
        pieces.push_back({named ? rows.data() : nullptr, 0, count, first, columns});
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t row = named ? rows[i] : i;
            for (int k = 0; k < columns; ++k) wanted.push_back(shards.share(row, first + k));
        }
    }
    const Bytes out = encoded(shards.out, dtype);
    std::vector<float> weights((shards.ranks + 2) * shards.rows * shards.heads), made(wanted.size());
    take_share({dtype, reinterpret_cast<const std::byte*>(out.data()), shards.rows, shards.heads,
                shards.dim, shards.lse.data(), shards.ranks, shards.rank, pieces, weights.data(),
                made.data()});
    Bytes rounded(made.size() * (dtype == Dtype::f32 ? 4 : 2));
    const auto size = static_cast<std::int64_t>(made.size());
    round_to(dtype, made.data(), size, reinterpret_cast<std::byte*>(rounded.data()));
    double worst = 0;
    for (std::int64_t i = 0; i < size; ++i) {
        worst = worse(worst, error_of(decoded(rounded.data(), dtype, i), wanted[i]));
    }
    return worst;
}

}  // namespace

int check_experts() {
    Random random(7);
    int wrong = 0, bad = 0;
    for (int i = 0; i < CALLS; ++i) wrong += wrong_choices(random, 1 + i % 3);
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
