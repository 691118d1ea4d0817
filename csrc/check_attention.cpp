// Attention over caches of every dtype, against attention in double precision.
#include <cmath>

#include "check.h"

namespace kvspan::check {
namespace {

constexpr int CALLS = 50;  // of each kernel
constexpr std::uint16_t BF16_NAN = 0x7fc0;

// The keys or the values of all slots, [blocks, heads, slots, dim]: as numbers, and as what a cache holds.
struct Vectors {
    int dim, parts[MAX_PARTS];
    std::vector<float> numbers;
    Bytes codes;
    std::vector<std::uint16_t> scales;  // [..., parts]

    int num_parts() const { return parts[1] > 0 ? 2 : 1; }
};

struct Problem {
    Dtype dtype, stored;
    int heads, kv_heads, value_dim, block_size;
    bool values_in_keys;
    std::vector<float> query;
    Vectors keys, values;
    std::vector<std::int64_t> row_starts{0}, table_starts{0}, tables, first, last;

    std::int64_t sequences() const { return static_cast<std::int64_t>(row_starts.size()) - 1; }
    std::int64_t rows() const { return row_starts.back(); }
    // Where a head's vector of a key is, in vectors.
    std::int64_t at(std::int64_t sequence, std::int64_t key, int head) const {
        const std::int64_t block = tables[table_starts[sequence] + key / block_size];
        return (block * kv_heads + head) * block_size + key % block_size;
    }
};

void add_sequence(Random& random, Problem& p) {
    const int context = pick(random, 0, 1) ? pick(random, 0, 200) : pick(random, 0, 1400);
    for (int rows = pick(random, 0, pick(random, 0, 3) ? 5 : 20); rows > 0; --rows) {
        p.last.push_back(pick(random, 0, context));
        p.first.push_back(pick(random, 0, 1) ? 0 : pick(random, 0, static_cast<int>(p.last.back())));
    }
    p.row_starts.push_back(static_cast<std::int64_t>(p.last.size()));
    for (int blocks = (context + p.block_size - 1) / p.block_size; blocks > 0; --blocks) {
        p.tables.push_back(static_cast<std::int64_t>(p.tables.size()));
    }
    p.table_starts.push_back(static_cast<std::int64_t>(p.tables.size()));
}

// Slots that nobody may read.
Vectors unseen(int dim, int second_part, std::size_t slots, Dtype stored) {
    Vectors v{dim, {dim - second_part, second_part}, std::vector<float>(slots * dim, NAN), {}, {}};
    if (!is_code(stored)) return v;
    v.codes.assign(slots * dim, 0x7f);
    v.scales.assign(slots * v.num_parts(), BF16_NAN);
    return v;
}

std::uint8_t code(Random& random, Dtype stored) {
    if (stored == Dtype::i8) return static_cast<std::uint8_t>(pick(random, -127, 127));
    return static_cast<std::uint8_t>(pick(random, 0, 0x47) | pick(random, 0, 1) << 7);  // up to 3.75
}

void fill(Random& random, Dtype stored, Vectors& v, std::int64_t at) {
    float* numbers = &v.numbers[at * v.dim];
    if (!is_code(stored)) {
        for (int d = 0; d < v.dim; ++d) numbers[d] = number(random);
        return;
    }
    for (int part = 0, d = 0; part < v.num_parts(); ++part) {
        const float unit = stored == Dtype::i8 ? 1.0f / 128 : 1.0f / 4;
        const float scale = unit * static_cast<float>(pick(random, 1, 4)) / 2;
        v.scales[at * v.num_parts() + part] = exact_bf16(scale);
        for (const int end = d + v.parts[part]; d < end; ++d) {
            v.codes[at * v.dim + d] = code(random, stored);
            numbers[d] = scale * static_cast<float>(decoded(v.codes.data(), stored, at * v.dim + d));
        }
    }
}

Problem make_problem(Random& random, Dtype dtype, Dtype stored) {
    Problem p{};
    p.dtype = dtype;
    p.stored = stored;
    p.kv_heads = pick(random, 1, 3);
    p.heads = p.kv_heads * pick(random, 1, pick(random, 0, 3) ? 8 : 40);
    p.block_size = 8 * pick(random, 1, 4);
    p.values_in_keys = pick(random, 0, 1);
    for (int sequences = pick(random, 0, 3); sequences > 0; --sequences) add_sequence(random, p);
    const std::size_t slots = p.tables.size() * p.block_size * p.kv_heads;
    const int head_dim = 8 * pick(random, 1, 24);
    const int second = is_code(stored) && head_dim > 8 ? 8 * pick(random, 0, head_dim / 8 - 1) : 0;
    p.keys = unseen(head_dim, second, slots, stored);
    p.value_dim = 8 * pick(random, 1, p.values_in_keys ? p.keys.parts[0] / 8 : 24);
    p.values = unseen(p.value_dim, 0, p.values_in_keys ? 0 : slots, stored);
    p.query = numbers(random, p.rows() * p.heads * head_dim);
    for (std::int64_t s = 0; s < p.sequences(); ++s) {
        for (std::int64_t row = p.row_starts[s]; row < p.row_starts[s + 1]; ++row) {
            for (std::int64_t key = p.first[row]; key < p.last[row]; ++key) {
                for (int head = 0; head < p.kv_heads; ++head) {
                    fill(random, stored, p.keys, p.at(s, key, head));
                    if (!p.values_in_keys) fill(random, stored, p.values, p.at(s, key, head));
                }
            }
        }
    }
    return p;
}

// The largest error of a row and head, its LSE's included; not a number if anything is wrong with it.
double error_of(const Problem& p, std::int64_t sequence, std::int64_t row, int head, double scale,
                const Bytes& out, float lse) {
    const int kv_head = head / (p.heads / p.kv_heads), dim = p.keys.dim;
    const float* q = &p.query[(row * p.heads + head) * dim];
    const Vectors& values = p.values_in_keys ? p.keys : p.values;
    std::vector<double> mean(p.value_dim, 0.0);
    double sum = 0;
    for (std::int64_t key = p.first[row]; key < p.last[row]; ++key) {
        const std::int64_t at = p.at(sequence, key, kv_head);
        const float *k = &p.keys.numbers[at * dim], *v = &values.numbers[at * values.dim];
        double score = 0;
        for (int d = 0; d < dim; ++d) score += static_cast<double>(q[d]) * k[d];
        const double weight = std::exp(score * scale);
        sum += weight;
        for (int d = 0; d < p.value_dim; ++d) mean[d] += weight * v[d];
    }
    const std::int64_t at = (row * p.heads + head) * p.value_dim;
    if (sum == 0) return lse == -INFINITY && decoded(out.data(), p.dtype, at) == 0 ? 0.0 : NAN;
    double worst = std::fabs(lse - std::log(sum));
    for (int d = 0; d < p.value_dim; ++d) {
        worst = worse(worst, std::fabs(decoded(out.data(), p.dtype, at + d) - mean[d] / sum));
    }
    return worst;
}

Cache cache_of(const Problem& p, const Vectors& v, const Bytes& elements) {
    const std::int64_t slots = p.block_size, parts = v.num_parts();
    return {is_code(p.stored) ? v.codes.data() : elements.data(),
            p.kv_heads * slots * v.dim,
            slots * v.dim,
            v.dim,
            {v.scales.data(), p.kv_heads * slots * parts, slots * parts, parts}};
}

double worst_error(const Problem& p, Isa isa, int threads) {
    const Dtype floats = is_code(p.stored) ? p.dtype : p.stored;  // where codes are, these are not read
    const Bytes query = encoded(p.query, p.dtype);
    const Bytes keys = encoded(p.keys.numbers, floats), values = encoded(p.values.numbers, floats);
    Bytes out(p.rows() * p.heads * p.value_dim * (p.dtype == Dtype::f32 ? 4 : 2));
    std::vector<float> lse(p.rows() * p.heads);
    const float scale = 0.7f / std::sqrt(static_cast<float>(p.keys.dim));
    const Cache key_cache = cache_of(p, p.keys, keys);
    const Attention call{
        .dtype = p.dtype,
        .stored = p.stored,
        .query = query.data(),
        .query_row_stride = std::int64_t{p.heads} * p.keys.dim,
        .query_head_stride = p.keys.dim,
        .keys = key_cache,
        .values = p.values_in_keys ? key_cache : cache_of(p, p.values, values),
        .heads = p.heads,
        .kv_heads = p.kv_heads,
        .head_dim = p.keys.dim,
        .value_dim = p.value_dim,
        .block_size = p.block_size,
        .part_dims = {p.keys.parts[0], p.keys.parts[1]},
        .sequences = p.sequences(),
        .row_starts = p.row_starts.data(),
        .table_starts = p.table_starts.data(),
        .tables = p.tables.data(),
        .first = p.first.data(),
        .last = p.last.data(),
        .scale = scale,
        .out = out.data(),
        .lse = lse.data(),
    };
    attend(call, attention_kernel(isa, p.dtype, p.stored), threads);
    double worst = 0;
    for (std::int64_t s = 0; s < p.sequences(); ++s) {
        for (std::int64_t row = p.row_starts[s]; row < p.row_starts[s + 1]; ++row) {
            for (int head = 0; head < p.heads; ++head) {
                worst = worse(worst, error_of(p, s, row, head, scale, out, lse[row * p.heads + head]));
            }
        }
    }
    return worst;
}

}  // namespace

int check_attention() {
    const double bounds[] = {1e-4, 3e-2, 1e-2};  // float32, bf16, fp16
    int wrong = 0;
    for (const Isa isa : isas()) {
        for (const Dtype dtype : FLOATS) {
            for (const Dtype stored : {dtype, Dtype::i8, Dtype::e4m3}) {
                Random random(7);
                double worst = 0;
                for (int i = 0; i < CALLS; ++i) {
                    const Problem problem = make_problem(random, dtype, stored);
                    worst = worse(worst, worst_error(problem, isa, 1 + i % 3));
                }
                wrong += judge("attention " + name_of(isa) + " " + name_of(dtype) + " over " + name_of(stored),
                               worst, bounds[static_cast<int>(dtype)]);
            }
        }
    }
    return wrong;
}

}  // namespace kvspan::check
