// Collectives between threads that each have mapped the memory of a group, as processes would.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "exchange.h"
#include "reduce.h"

namespace kvspan::check {
namespace {

constexpr int GROUPS = 24, COLLECTIVES = 12;  // of each group, one behind the other
constexpr double PATIENCE_S = 60;             // of one rank for the others, on a machine under load

// A collective that all ranks of a group take part in, and how far its results are off.
struct Collective {
    std::function<void(ShmGroup&, int rank)> start;
    std::function<double()> error;
};

struct Room {
    int ranks;
    std::int64_t slot, share;  // bytes
};

using Each = std::vector<Bytes>;  // of each rank

const std::byte* at(const Bytes& bytes) { return reinterpret_cast<const std::byte*>(bytes.data()); }
std::byte* at(Bytes& bytes) { return reinterpret_cast<std::byte*>(bytes.data()); }

Sizes some_sizes(Random& random, int count, int most) {
    Sizes sizes(count);
    for (auto& size : sizes) size = pick(random, 0, 3) ? pick(random, 0, most) : 0;
    return sizes;
}

std::int64_t total(const Sizes& sizes, std::size_t count) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += sizes[i];
    return sum;
}

Bytes some_bytes(Random& random, std::int64_t size) {
    Bytes found(size);
    for (auto& byte : found) byte = static_cast<std::uint8_t>(random());
    return found;
}

// Whole numbers whose sums over ranks every dtype holds.
std::vector<float> whole_numbers(Random& random, std::int64_t count) {
    std::vector<float> found(count);
    for (auto& x : found) x = static_cast<float>(pick(random, -8, 8));
    return found;
}

double same(const Bytes& found, const Bytes& wanted) { return found == wanted ? 0.0 : NAN; }

Collective all_gather(Random& random, const Room& room) {
    const auto sizes = some_sizes(random, room.ranks, static_cast<int>(3 * room.slot));
    const auto mine = std::make_shared<Each>(), out = std::make_shared<Each>();
    Bytes wanted;
    for (const auto size : sizes) {
        mine->push_back(some_bytes(random, size));
        out->push_back(Bytes(total(sizes, sizes.size())));
        wanted.insert(wanted.end(), mine->back().begin(), mine->back().end());
    }
    return {[=](ShmGroup& group, int r) {
                group.start_all_gather(at((*mine)[r]), sizes, at((*out)[r]));
            },
            [=] {
                double worst = 0;
                for (const Bytes& found : *out) worst = worse(worst, same(found, wanted));
                return worst;
            }};
}

Collective all_to_all(Random& random, const Room& room) {
    const auto parts = std::make_shared<std::vector<Each>>(room.ranks);  // [from][to]
    const auto out = std::make_shared<Each>();
    std::vector<Sizes> sent, arriving(room.ranks);
    for (int i = 0; i < room.ranks; ++i) {
        sent.push_back(some_sizes(random, room.ranks, static_cast<int>(3 * room.share)));
        for (int j = 0; j < room.ranks; ++j) {
            (*parts)[i].push_back(some_bytes(random, sent[i][j]));
            arriving[j].push_back(sent[i][j]);
        }
    }
    for (int j = 0; j < room.ranks; ++j) out->push_back(Bytes(total(arriving[j], room.ranks)));
    return {[=](ShmGroup& group, int r) {
                Addresses from;
                for (const Bytes& part : (*parts)[r]) {
                    from.push_back(reinterpret_cast<std::int64_t>(part.data()));
                }
                group.start_all_to_all(from, sent[r], arriving[r], at((*out)[r]));
            },
            [=] {
                double worst = 0;
                for (int j = 0; j < room.ranks; ++j) {
                    Bytes wanted;
                    for (const Each& from : *parts) {
                        wanted.insert(wanted.end(), from[j].begin(), from[j].end());
                    }
                    worst = worse(worst, same((*out)[j], wanted));
                }
                return worst;
            }};
}

// What each rank brings to a sum, and the sum.
struct Summands {
    Each of_rank;
    std::vector<float> sum;
};

Summands summands(Random& random, int ranks, std::int64_t count, Dtype dtype) {
    Summands found{{}, std::vector<float>(count, 0.0f)};
    for (int r = 0; r < ranks; ++r) {
        const auto part = whole_numbers(random, count);
        for (std::int64_t i = 0; i < count; ++i) found.sum[i] += part[i];
        found.of_rank.push_back(encoded(part, dtype));
    }
    return found;
}

Collective all_reduce(Random& random, const Room& room) {
    const Dtype dtype = FLOATS[pick(random, 0, 2)];
    // Above 32 KiB ranks sum a part each.
    const std::int64_t count = pick(random, 0, 3) ? pick(random, 0, 600) : pick(random, 20'000, 24'000);
    const bool in_place = pick(random, 0, 1);
    const auto given = std::make_shared<Summands>(summands(random, room.ranks, count, dtype));
    const auto out = std::make_shared<Each>(room.ranks, Bytes(count * bytes_of(dtype)));
    return {[=](ShmGroup& group, int r) {
                Bytes& mine = given->of_rank[r];
                group.start_all_reduce(dtype, at(mine), count, in_place ? at(mine) : at((*out)[r]));
            },
            [=] {
                double worst = 0;
                for (const Bytes& found : in_place ? given->of_rank : *out) {
                    worst = worse(worst, same(found, encoded(given->sum, dtype)));
                }
                return worst;
            }};
}

Collective reduce_scatter(Random& random, const Room& room) {
    const Dtype dtype = FLOATS[pick(random, 0, 2)];
    const auto sizes = some_sizes(random, room.ranks, 400);
    const std::int64_t count = total(sizes, sizes.size());
    const auto given = std::make_shared<Summands>(summands(random, room.ranks, count, dtype));
    const auto out = std::make_shared<Each>();
    for (const auto size : sizes) out->push_back(Bytes(size * bytes_of(dtype)));
    return {[=](ShmGroup& group, int r) {
                group.start_reduce_scatter(dtype, at(given->of_rank[r]), sizes, at((*out)[r]));
            },
            [=] {
                double worst = 0;
                for (int r = 0; r < room.ranks; ++r) {
                    const auto begin = given->sum.begin() + total(sizes, r);
                    const std::vector<float> part(begin, begin + sizes[r]);
                    worst = worse(worst, same((*out)[r], encoded(part, dtype)));
                }
                return worst;
            }};
}

// Partial attention of all ranks, and which piece of it each of them will own.
struct Sharded {
    Dtype dtype;
    std::int64_t rows, heads, head_dim;
    std::vector<std::vector<float>> values, lse;  // of each rank; NaN where it saw no key
    Each encoded_values;
    std::vector<std::vector<std::int64_t>> row_numbers;  // of each piece; empty = consecutive ones
    std::vector<Piece> pieces;

    std::int64_t width() const { return heads * head_dim; }

    double error(const Each& out) const {
        double worst = 0;
        for (std::size_t r = 0; r < pieces.size(); ++r) {
            const Piece& piece = pieces[r];
            for (std::int64_t i = 0; i < piece.num_rows * piece.num_columns; ++i) {
                const std::int64_t k = i / piece.num_columns;
                const std::int64_t column = piece.first_column + i % piece.num_columns;
                const std::int64_t row = piece.rows ? piece.rows[k] : piece.first_row + k;
                worst = worse(worst, error_of(decoded(out[r].data(), dtype, i), merged(row, column)));
            }
        }
        return worst / bound_of(dtype);
    }

    double merged(std::int64_t row, std::int64_t column) const {
        double sum = 0, weights = 0;
        for (std::size_t r = 0; r < values.size(); ++r) {
            const double its_lse = lse[r][row * heads + column / head_dim];
            if (!std::isfinite(its_lse)) continue;
            weights += std::exp(its_lse);
            sum += std::exp(its_lse) * values[r][row * width() + column];
        }
        return weights == 0 ? 0 : sum / weights;
    }
};

Piece some_piece(Random& random, const Sharded& s, std::vector<std::int64_t>& row_numbers) {
    const int rows = static_cast<int>(s.rows), width = static_cast<int>(s.width());
    Piece piece{};
    piece.num_rows = pick(random, 0, rows);
    piece.first_row = pick(random, 0, rows - static_cast<int>(piece.num_rows));
    piece.num_columns = pick(random, 0, width);
    piece.first_column = pick(random, 0, width - static_cast<int>(piece.num_columns));
    if (pick(random, 0, 1)) {
        row_numbers.resize(piece.num_rows);
        for (auto& row : row_numbers) row = pick(random, 0, rows - 1);
        piece.rows = row_numbers.data();
    }
    return piece;
}

std::shared_ptr<Sharded> sharded(Random& random, const Room& room) {
    const auto s = std::make_shared<Sharded>();
    s->dtype = FLOATS[pick(random, 0, 2)];
    s->head_dim = pick(random, 1, 12);
    // A row of all columns has to fit into a share.
    const auto fitting = (room.share - 4) / (4 + s->head_dim * bytes_of(s->dtype));
    s->heads = pick(random, 1, static_cast<int>(std::min<std::int64_t>(fitting, 6)));
    s->rows = pick(random, 1, 30);
    s->row_numbers.resize(room.ranks);
    for (int r = 0; r < room.ranks; ++r) {
        s->values.push_back(numbers(random, s->rows * s->width()));
        s->lse.push_back(numbers(random, s->rows * s->heads));
        for (std::int64_t i = 0; i < s->rows * s->heads; ++i) {
            if (pick(random, 0, 3)) continue;
            s->lse[r][i] = pick(random, 0, 1) ? -INFINITY : NAN;
            for (int d = 0; d < s->head_dim; ++d) s->values[r][i * s->head_dim + d] = NAN;
        }
        s->encoded_values.push_back(encoded(s->values[r], s->dtype));
        s->pieces.push_back(some_piece(random, *s, s->row_numbers[r]));
    }
    return s;
}

Collective merge_scatter(Random& random, const Room& room) {
    const auto given = sharded(random, room);
    const auto out = std::make_shared<Each>();
    for (const Piece& piece : given->pieces) {
        out->push_back(Bytes(piece.num_rows * piece.num_columns * bytes_of(given->dtype)));
    }
    return {[=](ShmGroup& group, int r) {
                const Partials mine{given->dtype,         at(given->encoded_values[r]), given->width(),
                                    given->lse[r].data(), given->heads,                 given->head_dim};
                group.start_merge_scatter(mine, given->pieces, at((*out)[r]));
            },
            [=] { return given->error(*out); }};
}

// An empty file that is gone when it is closed.
class File {
public:
    File() : file_(std::tmpfile()) {
        if (!file_) throw std::runtime_error("no temporary file can be made");
    }
    ~File() { std::fclose(file_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int number() const { return fileno(file_); }

private:
    std::FILE* file_;
};

// Calls `body` for each rank on a thread of its own.
void on_ranks(const Room& room, const std::function<void(ShmGroup&, int rank)>& body) {
    const File file;
    std::vector<std::thread> threads;
    for (int r = 0; r < room.ranks; ++r) {
        threads.emplace_back([&, r] {
            ShmGroup group(file.number(), 0, r, room.ranks, room.slot, room.ranks);
            body(group, r);
        });
    }
    for (auto& thread : threads) thread.join();
}

Room some_room(Random& random) {
    const int ranks = pick(random, 1, 4);
    const std::int64_t line = CACHE_LINE, slot = line * ranks * pick(random, 1, 6);
    return {ranks, slot, slot / ranks};
}

double collective_error(Random& random) {
    using Make = Collective (*)(Random&, const Room&);
    const Make makes[] = {all_gather, all_to_all, all_reduce, reduce_scatter, merge_scatter};
    const Room room = some_room(random);
    std::vector<Collective> collectives;
    for (int i = 0; i < COLLECTIVES; ++i) collectives.push_back(makes[pick(random, 0, 4)](random, room));
    std::vector<int> absent(room.ranks, -1);
    on_ranks(room, [&](ShmGroup& group, int r) {
        for (const auto& collective : collectives) {
            if (absent[r] >= 0) return;
            collective.start(group, r);
            absent[r] = group.finish(PATIENCE_S);
        }
    });
    double worst = 0;
    for (const int rank : absent) worst = worse(worst, rank < 0 ? 0.0 : NAN);
    for (const auto& collective : collectives) worst = worse(worst, collective.error());
    return worst;
}

// A rank that does not come is named, and one that brings too much is refused.
double fault_error() {
    const Room room{3, 3 * CACHE_LINE, CACHE_LINE};
    std::vector<int> named(3, -1), refused(3, 0);
    const Bytes mine(8);
    on_ranks(room, [&](ShmGroup& group, int r) {
        Bytes out(24);
        if (r == 2) return;
        group.start_all_gather(at(mine), {8, 8, 8}, at(out));
        named[r] = group.finish(0.05);
    });
    on_ranks(room, [&](ShmGroup& group, int r) {
        const std::int64_t size = r == 2 ? 4 : 8;  // two ranks expect 8 bytes of it
        Bytes out(24);
        group.start_all_gather(at(mine), {8, 8, size}, at(out));
        try {
            group.finish(PATIENCE_S);
        } catch (const std::runtime_error&) {
            refused[r] = 1;
        }
    });
    return named[0] == 2 && named[1] == 2 && refused[0] && refused[1] && !refused[2] ? 0.0 : NAN;
}

}  // namespace

int check_exchange() {
    Random random(7);
    double worst = 0;
    for (int i = 0; i < GROUPS; ++i) worst = worse(worst, collective_error(random));
    return judge("collectives, in parts of the bound", worst, 1.0) +
           judge("ranks that are absent or disagree", fault_error(), 0.0);
}

}  // namespace kvspan::check
