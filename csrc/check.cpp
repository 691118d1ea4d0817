// Random calls of every kernel this processor runs against attention written out in double precision,
// for the sanitizers: every buffer ends where its last element does, and slots that no row sees hold
// NaN.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "attention.h"
#include "isa.h"

using namespace kvspan;

namespace {

struct Problem {
    Dtype dtype;
    int heads, kv_heads, head_dim, value_dim, block_size;
    bool values_in_keys;
    std::vector<float> query, keys, values;
    std::vector<std::int64_t> row_starts{0}, table_starts{0}, tables, first, last;

    std::int64_t rows() const { return row_starts.back(); }
    std::int64_t slot(std::int64_t sequence, std::int64_t key) const {
        return tables[table_starts[sequence] + key / block_size] * block_size + key % block_size;
    }
    // Element (slot, head, dim) of a cache whose slots have `width` dims.
    std::int64_t at(std::int64_t slot, int head, int width) const {
        return ((slot / block_size * kv_heads + head) * block_size + slot % block_size) * width;
    }
};

using Random = std::mt19937;

int pick(Random& random, int low, int high) { return std::uniform_int_distribution(low, high)(random); }

// A number that every dtype holds exactly.
float number(Random& random) { return static_cast<float>(pick(random, -64, 64)) / 32.0f; }

Problem make_problem(Random& random, Dtype dtype) {
    Problem p{};
    p.dtype = dtype;
    p.kv_heads = pick(random, 1, 3);
    p.heads = p.kv_heads * pick(random, 1, pick(random, 0, 3) ? 8 : 40);
    p.head_dim = 8 * pick(random, 1, 24);
    p.values_in_keys = pick(random, 0, 1);
    p.value_dim = p.values_in_keys ? 8 * pick(random, 1, p.head_dim / 8) : 8 * pick(random, 1, 24);
    p.block_size = 8 * pick(random, 1, 4);
    const int sequences = pick(random, 0, 3);
    for (int s = 0; s < sequences; ++s) {
        const int context = pick(random, 0, 1) ? pick(random, 0, 200) : pick(random, 0, 1400);
        for (int rows = pick(random, 0, 5); rows > 0; --rows) {
            p.last.push_back(pick(random, 0, context));
            p.first.push_back(pick(random, 0, 1) ? 0 : pick(random, 0, static_cast<int>(p.last.back())));
        }
        p.row_starts.push_back(static_cast<std::int64_t>(p.last.size()));
        for (int blocks = (context + p.block_size - 1) / p.block_size; blocks > 0; --blocks) {
            p.tables.push_back(static_cast<std::int64_t>(p.tables.size()));
        }
        p.table_starts.push_back(static_cast<std::int64_t>(p.tables.size()));
    }
    const std::size_t slots = p.tables.size() * p.block_size * p.kv_heads;
    p.keys.assign(slots * p.head_dim, NAN);
    p.values.assign(p.values_in_keys ? 0 : slots * p.value_dim, NAN);
    for (int i = 0; i < p.rows() * p.heads * p.head_dim; ++i) p.query.push_back(number(random));
    for (int s = 0; s < sequences; ++s) {
        for (std::int64_t row = p.row_starts[s]; row < p.row_starts[s + 1]; ++row) {
            for (std::int64_t key = p.first[row]; key < p.last[row]; ++key) {
                for (int head = 0; head < p.kv_heads; ++head) {
                    float* k = &p.keys[p.at(p.slot(s, key), head, p.head_dim)];
                    for (int d = 0; d < p.head_dim; ++d) k[d] = number(random);
                    if (p.values_in_keys) continue;
                    float* v = &p.values[p.at(p.slot(s, key), head, p.value_dim)];
                    for (int d = 0; d < p.value_dim; ++d) v[d] = number(random);
                }
            }
        }
    }
    return p;
}

std::vector<std::uint8_t> encoded(const std::vector<float>& numbers, Dtype dtype) {
    const std::size_t bytes = dtype == Dtype::f32 ? 4 : 2;
    std::vector<std::uint8_t> out(numbers.size() * bytes);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, &numbers[i], 4);
        std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
        if (dtype == Dtype::f16) {
            const std::uint32_t magnitude = bits & 0x7fffffffu;
            const std::uint32_t exponent = std::isnan(numbers[i]) ? 0x7e00u
                                           : magnitude            ? (magnitude - 0x38000000u) >> 13
                                                                  : 0u;
            half = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | exponent);
        }
        std::memcpy(&out[i * bytes], dtype == Dtype::f32 ? static_cast<void*>(&bits) : &half, bytes);
    }
    return out;
}

double decoded(const std::uint8_t* bytes, Dtype dtype, std::size_t i) {
    if (dtype == Dtype::f32) {
        float value;
        std::memcpy(&value, bytes + i * 4, 4);
        return value;
    }
    std::uint16_t half;
    std::memcpy(&half, bytes + i * 2, 2);
    if (dtype == Dtype::bf16) {
        const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const double magnitude =
        exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

// The largest error of a row and head, its LSE's included; not a number if anything is wrong with it.
double error_of(const Problem& p, std::int64_t sequence, std::int64_t row, int head, double scale,
                const std::uint8_t* out, const float* lse) {
    const int kv_head = head / (p.heads / p.kv_heads);
    const float* q = &p.query[(row * p.heads + head) * p.head_dim];
    std::vector<double> mean(p.value_dim, 0.0);
    double sum = 0;
    for (std::int64_t key = p.first[row]; key < p.last[row]; ++key) {
        const float* k = &p.keys[p.at(p.slot(sequence, key), kv_head, p.head_dim)];
        const float* v =
            p.values_in_keys ? k : &p.values[p.at(p.slot(sequence, key), kv_head, p.value_dim)];
        double score = 0;
        for (int d = 0; d < p.head_dim; ++d) score += static_cast<double>(q[d]) * k[d];
        const double weight = std::exp(score * scale);
        sum += weight;
        for (int d = 0; d < p.value_dim; ++d) mean[d] += weight * v[d];
    }
    const std::int64_t at = row * p.heads + head;
    if (sum == 0)
        return lse[at] == -INFINITY && decoded(out, p.dtype, at * p.value_dim) == 0 ? 0.0 : NAN;
    double worst = std::fabs(lse[at] - std::log(sum));
    for (int d = 0; d < p.value_dim; ++d) {
        const double error = std::fabs(decoded(out, p.dtype, at * p.value_dim + d) - mean[d] / sum);
        worst = error <= worst ? worst : error;
    }
    return worst;
}

double worst_error(const Problem& p, Isa isa, int threads) {
    const auto query = encoded(p.query, p.dtype), keys = encoded(p.keys, p.dtype);
    const auto values = encoded(p.values, p.dtype);
    const int width = p.values_in_keys ? p.head_dim : p.value_dim;
    const auto cache = [&](const void* data, int dims) {
        return Cache{data, std::int64_t{p.kv_heads} * p.block_size * dims,
                     std::int64_t{p.block_size} * dims, dims, {}};
    };
    std::vector<std::uint8_t> out(p.rows() * p.heads * p.value_dim * (p.dtype == Dtype::f32 ? 4 : 2));
    std::vector<float> lse(p.rows() * p.heads);
    const float scale = 0.7f / std::sqrt(static_cast<float>(p.head_dim));
    const Attention call{
        .dtype = p.dtype,
        .stored = p.dtype,
        .query = query.data(),
        .query_row_stride = std::int64_t{p.heads} * p.head_dim,
        .query_head_stride = p.head_dim,
        .keys = cache(keys.data(), p.head_dim),
        .values = cache(p.values_in_keys ? keys.data() : values.data(), width),
        .heads = p.heads,
        .kv_heads = p.kv_heads,
        .head_dim = p.head_dim,
        .value_dim = p.value_dim,
        .block_size = p.block_size,
        .part_dims = {p.head_dim, 0},
        .sequences = static_cast<std::int64_t>(p.row_starts.size()) - 1,
        .row_starts = p.row_starts.data(),
        .table_starts = p.table_starts.data(),
        .tables = p.tables.data(),
        .first = p.first.data(),
        .last = p.last.data(),
        .scale = scale,
        .out = out.data(),
        .lse = lse.data(),
    };
    attend(call, attention_kernel(isa, p.dtype, p.dtype), threads);
    double worst = 0;
    for (std::int64_t s = 0; s + 1 < static_cast<std::int64_t>(p.row_starts.size()); ++s) {
        for (std::int64_t row = p.row_starts[s]; row < p.row_starts[s + 1]; ++row) {
            for (int head = 0; head < p.heads; ++head) {
                const double error = error_of(p, s, row, head, scale, out.data(), lse.data());
                worst = error <= worst ? worst : error;
            }
        }
    }
    return worst;
}

}  // namespace

int main() {
    const double bounds[] = {1e-4, 3e-2, 1e-2};  // float32, bf16, fp16
    int wrong = 0;
    for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
        if (!available(isa)) continue;
        for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
            Random random(7);
            double worst = 0;
            for (int i = 0; i < 60; ++i) {
                const double error = worst_error(make_problem(random, dtype), isa, 1 + i % 3);
                worst = error <= worst ? worst : error;
            }
            const bool right = worst < bounds[static_cast<int>(dtype)];
            std::printf("isa %d dtype %d: error %.1e%s\n", static_cast<int>(isa),
                        static_cast<int>(dtype), worst, right ? "" : " is too large");
            wrong += !right;
        }
    }
    return wrong;
}
