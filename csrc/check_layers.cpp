// Linear layers and what happens to rows between them, against double precision.
#include <cmath>

#include "check.h"

namespace kvspan::check {
namespace {

constexpr int CALLS = 60;  // of each kernel

struct Layer {
    std::int64_t rows, inputs, outputs, stride;
    std::int64_t before, after;  // pairs of inputs that the weight has and this layer does not read
    bool gated, biased, wide;
    std::vector<float> input, weight, bias;  // weight [outputs or 2 * outputs, inputs]

    std::int64_t sums() const { return gated ? 2 * outputs : outputs; }
};

// Elements of `rows` rows that are `stride` apart, the last of which ends at `size`.
std::int64_t extent(std::int64_t rows, std::int64_t stride, std::int64_t size) {
    return rows == 0 ? 0 : (rows - 1) * stride + size;
}

Layer make_layer(Random& random) {
    Layer layer{};
    layer.rows = pick(random, 0, 5) ? pick(random, 0, 30) : pick(random, 240, 500);
    layer.inputs = pick(random, 1, 90);
    layer.outputs = pick(random, 1, 150);
    layer.stride = layer.inputs + pick(random, 0, 3);
    layer.before = pick(random, 0, 1) * pick(random, 0, 9);
    layer.after = pick(random, 0, 1) * pick(random, 0, 9);
    layer.gated = pick(random, 0, 1);
    layer.biased = pick(random, 0, 1);
    layer.wide = pick(random, 0, 1);
    layer.input = numbers(random, extent(layer.rows, layer.stride, layer.inputs));
    layer.weight = numbers(random, layer.sums() * layer.inputs);
    layer.bias = numbers(random, layer.biased ? layer.sums() : 0);
    return layer;
}

// The weight in panels: of a gated layer, the gates of half a panel's outputs and then their ups. What
// is not to be read is not zero.
std::vector<float> panels_of(const Layer& layer, const Linear& call) {
    const bool some = layer.before || layer.after;
    std::vector<float> packed(call.panels() * call.panel_pairs * LINEAR_PANEL * 2, some ? 3.0f : 0.0f);
    const int of_panel = call.panel_outputs();
    for (std::int64_t n = 0; n < layer.sums(); ++n) {
        const std::int64_t output = n % layer.outputs, panel = output / of_panel;
        const std::int64_t place = output % of_panel + (n >= layer.outputs ? of_panel : 0);
        for (std::int64_t k = 0; k < layer.inputs; ++k) {
            const std::int64_t pair = panel * call.panel_pairs + layer.before + k / 2;
            packed[(pair * LINEAR_PANEL + place) * 2 + k % 2] = layer.weight[n * layer.inputs + k];
        }
    }
    return packed;
}

double silu(double x) { return x / (1 + std::exp(-x)); }

double sum_of(const Layer& layer, std::int64_t row, std::int64_t n) {
    double sum = layer.biased ? layer.bias[n] : 0.0;
    for (std::int64_t k = 0; k < layer.inputs; ++k) {
        sum += static_cast<double>(layer.input[row * layer.stride + k]) *
               layer.weight[n * layer.inputs + k];
    }
    return sum;
}

double worst_error(const Layer& layer, Isa isa, int threads) {
    const Dtype dtype = layer.wide ? Dtype::f32 : Dtype::bf16;
    const Bytes input = encoded(layer.input, Dtype::bf16), bias = encoded(layer.bias, Dtype::bf16);
    Bytes out(layer.rows * layer.outputs * (layer.wide ? 4 : 2));
    Linear call{input.data(),
                layer.rows,
                layer.stride,
                nullptr,
                layer.outputs,
                layer.inputs,
                layer.before + (layer.inputs + 1) / 2 + layer.after,
                layer.biased ? bias.data() : nullptr,
                layer.biased ? bias.data() + layer.outputs * sizeof(std::uint16_t) : nullptr,
                out.data(),
                layer.wide,
                layer.gated};
    const Bytes weight = encoded(panels_of(layer, call), Dtype::bf16);
    call.weight = weight.data() + layer.before * LINEAR_PANEL * 2 * sizeof(std::uint16_t);
    multiply(call, linear_kernel(isa), threads);
    double worst = 0;
    for (std::int64_t row = 0; row < layer.rows; ++row) {
        for (std::int64_t n = 0; n < layer.outputs; ++n) {
            const double sum = sum_of(layer, row, n);
            const double wanted = layer.gated ? silu(sum) * sum_of(layer, row, layer.outputs + n) : sum;
            const double found = decoded(out.data(), dtype, row * layer.outputs + n);
            worst = worse(worst, error_of(found, wanted) / bound_of(dtype));
        }
    }
    return worst;
}

std::int64_t some_rows(Random& random, int size) {
    return pick(random, 0, 9) ? pick(random, 0, 20) : 80'000 / size;  // enough for several threads
}

double norm_error(Random& random, Isa isa, Dtype dtype, int threads) {
    const int size = pick(random, 1, 200), heads = pick(random, 0, 1) ? 1 : pick(random, 2, 4);
    const std::int64_t rows = some_rows(random, heads * size), head_stride = size + pick(random, 0, 3);
    const std::int64_t row_stride = heads * head_stride + pick(random, 0, 5);
    const bool residual = pick(random, 0, 1);
    const auto numbers_before =
        numbers(random, extent(rows, row_stride, extent(heads, head_stride, size)));
    const auto numbers_more = numbers(random, residual ? rows * heads * size : 0);
    Bytes x = encoded(numbers_before, dtype);
    const Bytes more = encoded(numbers_more, dtype), weight = encoded(numbers(random, size), dtype);
    Bytes out(rows * heads * size * (dtype == Dtype::f32 ? 4 : 2));
    const RmsNorm call{x.data(), rows, row_stride, head_stride, heads, residual ? more.data() : nullptr,
                       size,     weight.data(), 1e-5f, out.data()};
    run_rows(call, row_kernels(isa, dtype), threads);
    double worst = 0;
    for (std::int64_t vector = 0; vector < rows * heads; ++vector) {
        const std::int64_t from = vector / heads * row_stride + vector % heads * head_stride;
        double squares = 0;
        for (int i = 0; i < size; ++i) {
            const double sum = decoded(x.data(), dtype, from + i);
            const double added = residual ? numbers_more[vector * size + i] : 0.0;
            worst = worse(worst, error_of(sum, numbers_before[from + i] + added));
            squares += sum * sum;
        }
        const double scale = 1 / std::sqrt(squares / size + 1e-5);
        for (int i = 0; i < size; ++i) {
            const double wanted =
                decoded(x.data(), dtype, from + i) * scale * decoded(weight.data(), dtype, i);
            worst = worse(worst, error_of(decoded(out.data(), dtype, vector * size + i), wanted));
        }
    }
    return worst;
}

double silu_error(Random& random, Isa isa, Dtype dtype, int threads) {
    const int size = pick(random, 1, 200);
    const std::int64_t rows = some_rows(random, size), stride = 2 * size + pick(random, 0, 5);
    const auto both = numbers(random, extent(rows, stride, 2 * size));
    const Bytes gate_up = encoded(both, dtype);
    Bytes out(rows * size * (dtype == Dtype::f32 ? 4 : 2));
    const SiluMul call{gate_up.data(), rows, stride, size, out.data()};
    run_rows(call, row_kernels(isa, dtype), threads);
    double worst = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        const float *gate = &both[row * stride], *up = gate + size;
        for (int i = 0; i < size; ++i) {
            const double found = decoded(out.data(), dtype, row * size + i);
            worst = worse(worst, error_of(found, silu(gate[i]) * up[i]));
        }
    }
    return worst;
}

double rotate_error(Random& random, Isa isa, Dtype dtype, int threads) {
    const int half = pick(random, 1, 70), dim = 2 * half, heads = pick(random, 1, 5);
    const int plain = pick(random, 0, 1) * pick(random, 1, 40), width = plain + dim;
    const bool interleaved = pick(random, 0, 1);
    const std::int64_t rows = some_rows(random, heads * width);
    const std::int64_t head_stride = width + pick(random, 0, 3);
    const std::int64_t row_stride = heads * head_stride + pick(random, 0, 3);
    const auto before = numbers(random, extent(rows, row_stride, extent(heads, head_stride, width)));
    const auto cos = numbers(random, rows * half), sin = numbers(random, rows * half);
    const Bytes x = encoded(before, dtype);
    Bytes out(rows * heads * width * (dtype == Dtype::f32 ? 4 : 2));
    const Rotate call{x.data(),    rows,       row_stride, head_stride, heads, plain, dim,
                      interleaved, cos.data(), sin.data(), out.data()};
    run_rows(call, row_kernels(isa, dtype), threads);
    double worst = 0;
    for (std::int64_t i = 0; i < rows * heads * half; ++i) {
        const std::int64_t row = i / half / heads, head = i / half % heads, d = i % half;
        const float* of_head = &before[row * row_stride + head * head_stride + plain];
        const double a = of_head[interleaved ? 2 * d : d];
        const double b = of_head[interleaved ? 2 * d + 1 : half + d];
        const double c = cos[row * half + d], s = sin[row * half + d];
        const std::int64_t at = (row * heads + head) * width + plain + d;
        worst = worse(worst, error_of(decoded(out.data(), dtype, at), a * c - b * s));
        worst = worse(worst, error_of(decoded(out.data(), dtype, at + half), b * c + a * s));
    }
    for (std::int64_t i = 0; i < rows * heads * plain; ++i) {
        const std::int64_t row = i / plain / heads, head = i / plain % heads, d = i % plain;
        const double wanted = before[row * row_stride + head * head_stride + d];
        const double found = decoded(out.data(), dtype, (row * heads + head) * width + d);
        worst = worse(worst, found == wanted ? 0.0 : 1.0);
    }
    return worst;
}

// Products by head: sums of a matrix's rows if `summed`, dot products with them if not.
double head_error(Random& random, Isa isa, Dtype dtype, int threads, bool summed) {
    const int inputs = pick(random, 1, 90), heads = pick(random, 0, 4);
    const int outputs = pick(random, 0, 4) ? pick(random, 1, 80) : pick(random, 250, 530);
    const std::int64_t rows = pick(random, 0, 19);
    const std::int64_t head_stride = inputs + pick(random, 0, 3);
    const std::int64_t row_stride = heads * head_stride + pick(random, 0, 3);
    const int height = summed ? inputs : outputs, width = summed ? outputs : inputs;
    const std::int64_t step = width + pick(random, 0, 3), of_head = height * step + pick(random, 0, 9);
    const auto before = numbers(random, extent(rows, row_stride, extent(heads, head_stride, inputs)));
    const auto matrices = numbers(random, extent(heads, of_head, extent(height, step, width)));
    const Bytes x = encoded(before, dtype), weight = encoded(matrices, dtype);
    Bytes out(rows * heads * outputs * (dtype == Dtype::f32 ? 4 : 2));
    const HeadProduct call{x.data(), rows,          row_stride, head_stride, heads,     inputs,
                           outputs,  weight.data(), of_head,    step,        out.data()};
    (summed ? sum_rows : dot_rows)(call, head_kernels(isa, dtype), threads);
    double worst = 0;
    for (std::int64_t i = 0; i < rows * heads * outputs; ++i) {
        const std::int64_t row = i / outputs / heads, head = i / outputs % heads, output = i % outputs;
        double wanted = 0;
        for (int k = 0; k < inputs; ++k) {
            const std::int64_t at = head * of_head + (summed ? k * step + output : output * step + k);
            wanted += double{before[row * row_stride + head * head_stride + k]} * matrices[at];
        }
        worst = worse(worst, error_of(decoded(out.data(), dtype, i), wanted));
    }
    return worst;
}

double sums_error(Random& random, Isa isa, Dtype dtype, int threads) {
    return head_error(random, isa, dtype, threads, true);
}

double dots_error(Random& random, Isa isa, Dtype dtype, int threads) {
    return head_error(random, isa, dtype, threads, false);
}

}  // namespace

int check_linear() {
    int wrong = 0;
    for (const Isa isa : isas()) {
        Random random(7);
        double worst = 0;
        for (int i = 0; i < CALLS; ++i) {
            worst = worse(worst, worst_error(make_layer(random), isa, 1 + i % 3));
        }
        wrong += judge("linear " + name_of(isa) + ", in parts of the bound", worst, 1.0);
    }
    return wrong;
}

int check_rows() {
    using Check = double (*)(Random&, Isa, Dtype, int threads);
    const std::pair<const char*, Check> checks[] = {
        {"rms_norm ", norm_error},   {"silu_mul ", silu_error},   {"rotate ", rotate_error},
        {"head_sums ", sums_error}, {"head_dots ", dots_error}};
    int wrong = 0;
    for (const auto& [name, check] : checks) {
        for (const Isa isa : isas()) {
            for (const Dtype dtype : FLOATS) {
                Random random(7);
                double worst = 0;
                for (int i = 0; i < CALLS; ++i) {
                    worst = worse(worst, check(random, isa, dtype, 1 + i % 3));
                }
                wrong += judge(name + name_of(isa) + " " + name_of(dtype), worst, bound_of(dtype));
            }
        }
    }
    return wrong;
}

}  // namespace kvspan::check
