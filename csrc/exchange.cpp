#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "reduce.h"

namespace kvspan {
namespace {

// Up to here every rank sums everything, which takes one barrier; above, each sums a part, which takes
// two.
constexpr std::int64_t SUMMED_BY_ALL_BYTES = 32 << 10;

constexpr double FOREVER_S = 1e9;  // clocks count nanoseconds in 64 bits

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// A range of `total` bytes in pieces of `step`.
struct Pieces {
    std::int64_t total, step;

    std::uint64_t count() const { return static_cast<std::uint64_t>(ceil_div(total, step)); }
    std::int64_t begin(std::uint64_t round) const {
        return std::min(total, static_cast<std::int64_t>(round) * step);
    }
    std::int64_t size(std::uint64_t round) const { return begin(round + 1) - begin(round); }
};

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

// Where the ranks' parts begin when they lie one behind the other.
Sizes starts_of(const Sizes& sizes) {
    Sizes starts(sizes.size());
    std::exclusive_scan(sizes.begin(), sizes.end(), starts.begin(), std::int64_t{0});
    return starts;
}

// What all readers are to find is the same: the whole slot is for everybody.
class AllGather final : public Collective {
public:
    AllGather(int rank, const std::byte* mine, const Sizes& sizes, std::byte* out, std::int64_t room)
        : rank_(rank), mine_(mine), sizes_(sizes), starts_(starts_of(sizes)), out_(out), room_(room) {}

    std::uint64_t rounds() const override {
        return Pieces{*std::max_element(sizes_.begin(), sizes_.end()), room_}.count();
    }
    std::uint64_t bytes_for(int) const override { return sizes_[rank_]; }
    std::uint64_t bytes_from(int writer) const override { return sizes_[writer]; }

    void put(std::uint64_t round, std::byte* slot) override {
        const Pieces pieces{sizes_[rank_], room_};
        copy_bytes(slot, mine_ + pieces.begin(round), pieces.size(round));
    }

    void take(std::uint64_t round, const std::byte* const* slots) override {
        for (std::size_t i = 0; i < sizes_.size(); ++i) {
            const Pieces pieces{sizes_[i], room_};
            copy_bytes(out_ + starts_[i] + pieces.begin(round), slots[i], pieces.size(round));
        }
    }

private:
    int rank_;
    const std::byte* mine_;
    Sizes sizes_, starts_;
    std::byte* out_;
    std::int64_t room_;
};

// Every reader finds something else: reader j's share of the slot begins at j * share.
class AllToAll final : public Collective {
public:
    AllToAll(int rank, const Addresses& parts, const Sizes& sent, const Sizes& arriving, std::byte* out,
             std::int64_t share)
        : rank_(rank), parts_(parts), sent_(sent), arriving_(arriving), out_(out), share_(share) {}

    std::uint64_t rounds() const override {
        return Pieces{*std::max_element(sent_.begin(), sent_.end()), share_}.count();
    }
    std::uint64_t bytes_for(int reader) const override { return sent_[reader]; }
    std::uint64_t bytes_from(int writer) const override { return arriving_[writer]; }

    void put(std::uint64_t round, std::byte* slot) override {
        for (int j = 0; j < static_cast<int>(sent_.size()); ++j) {
            const Pieces pieces{sent_[j], share_};
            if (j != rank_)
                copy_bytes(slot + j * share_, part(j) + pieces.begin(round), pieces.size(round));
        }
    }

    void take(std::uint64_t round, const std::byte* const* slots) override {
        std::byte* to = out_;
        for (int i = 0; i < static_cast<int>(arriving_.size()); to += arriving_[i++]) {
            const Pieces pieces{arriving_[i], share_};
            const std::int64_t begin = pieces.begin(round);
            const std::byte* from = i == rank_ ? part(i) + begin : slots[i] + rank_ * share_;
            copy_bytes(to + begin, from, pieces.size(round));
        }
    }

private:
    const std::byte* part(int j) const { return reinterpret_cast<const std::byte*>(parts_[j]); }

    int rank_;
    Addresses parts_;
    Sizes sent_, arriving_;
    std::byte* out_;
    std::int64_t share_;
};

class AllReduce final : public Collective {
public:
    AllReduce(Dtype dtype, int rank, int size, const std::byte* mine, std::int64_t count, std::byte* out,
              std::int64_t room)
        : dtype_(dtype),
          rank_(rank),
          size_(size),
          mine_(mine),
          out_(out),
          pieces_{count * bytes_of(dtype), room} {}

    std::uint64_t rounds() const override { return pieces_.count(); }
    std::uint64_t bytes_for(int) const override { return pieces_.total; }
    std::uint64_t bytes_from(int) const override { return pieces_.total; }

    void put(std::uint64_t round, std::byte* slot) override {
        copy_bytes(slot, mine_ + pieces_.begin(round), pieces_.size(round));
    }

    void take(std::uint64_t round, const std::byte* const* slots) override {
        std::vector<const std::byte*> from(slots, slots + size_);
        from[rank_] = mine_ + pieces_.begin(round);
        sum(dtype_, from.data(), size_, pieces_.size(round) / bytes_of(dtype_),
            out_ + pieces_.begin(round));
    }

private:
    Dtype dtype_;
    int rank_, size_;
    const std::byte* mine_;
    std::byte* out_;
    Pieces pieces_;
};

// For large sums among many: in even rounds each rank sums a part of the piece, in odd ones all hear of
// it.
class AllReduceInParts final : public Collective {
public:
    AllReduceInParts(Dtype dtype, int rank, int size, const std::byte* mine, std::int64_t count,
                     std::byte* out, std::int64_t room)
        : dtype_(dtype),
          rank_(rank),
          size_(size),
          mine_(mine),
          out_(out),
          pieces_{count * bytes_of(dtype), room} {}

    std::uint64_t rounds() const override { return 2 * pieces_.count(); }
    std::uint64_t bytes_for(int) const override { return pieces_.total; }
    std::uint64_t bytes_from(int) const override { return pieces_.total; }

    void put(std::uint64_t round, std::byte* slot) override {
        const std::int64_t begin = pieces_.begin(round / 2);
        if (round % 2 == 0) return copy_bytes(slot, mine_ + begin, pieces_.size(round / 2));
        const Pieces parts = parts_of(round / 2);
        copy_bytes(slot, out_ + begin + parts.begin(rank_), parts.size(rank_));
    }

    void take(std::uint64_t round, const std::byte* const* slots) override {
        const Pieces parts = parts_of(round / 2);
        std::byte* to = out_ + pieces_.begin(round / 2);
        if (round % 2 == 0) {
            std::vector<const std::byte*> from(slots, slots + size_);
            for (auto& slot : from) slot += parts.begin(rank_);
            return sum(dtype_, from.data(), size_, parts.size(rank_) / bytes_of(dtype_),
                       to + parts.begin(rank_));
        }
        for (int i = 0; i < size_; ++i) {
            if (i != rank_) copy_bytes(to + parts.begin(i), slots[i], parts.size(i));
        }
    }

private:
    // Part i of a piece is summed by rank i.
    Pieces parts_of(std::uint64_t piece) const {
        const std::int64_t bytes = pieces_.size(piece), line = CACHE_LINE;
        return {bytes, std::max(line, ceil_div(ceil_div(bytes, size_), line) * line)};
    }

    Dtype dtype_;
    int rank_, size_;
    const std::byte* mine_;
    std::byte* out_;
    Pieces pieces_;
};

class ReduceScatter final : public Collective {
public:
    ReduceScatter(Dtype dtype, int rank, const std::byte* mine, const Sizes& sizes, std::byte* out,
                  std::int64_t share)
        : dtype_(dtype), rank_(rank), mine_(mine), sizes_(sizes), out_(out), share_(share) {
        for (auto& size : sizes_) size *= bytes_of(dtype);
        starts_ = starts_of(sizes_);
    }

    std::uint64_t rounds() const override {
        return Pieces{*std::max_element(sizes_.begin(), sizes_.end()), share_}.count();
    }
    std::uint64_t bytes_for(int reader) const override { return sizes_[reader]; }
    std::uint64_t bytes_from(int) const override { return sizes_[rank_]; }

    void put(std::uint64_t round, std::byte* slot) override {
        for (int j = 0; j < static_cast<int>(sizes_.size()); ++j) {
            const Pieces pieces{sizes_[j], share_};
            const std::byte* from = mine_ + starts_[j] + pieces.begin(round);
            if (j != rank_) copy_bytes(slot + j * share_, from, pieces.size(round));
        }
    }

    void take(std::uint64_t round, const std::byte* const* slots) override {
        const Pieces pieces{sizes_[rank_], share_};
        std::vector<const std::byte*> from(sizes_.size());
        for (std::size_t i = 0; i < from.size(); ++i) from[i] = slots[i] + rank_ * share_;
        from[rank_] = mine_ + starts_[rank_] + pieces.begin(round);
        sum(dtype_, from.data(), static_cast<int>(from.size()), pieces.size(round) / bytes_of(dtype_),
            out_ + pieces.begin(round));
    }

private:
    Dtype dtype_;
    int rank_;
    const std::byte* mine_;
    Sizes sizes_, starts_;
    std::byte* out_;
    std::int64_t share_;
};

// Row by row, a reader finds the LSEs of the heads that its piece touches, and its columns behind them.
class MergeScatter final : public Collective {
public:
    MergeScatter(const Partials& partials, std::vector<Piece> pieces, int rank, std::byte* out,
                 std::int64_t share)
        : partials_(partials), pieces_(std::move(pieces)), rank_(rank), out_(out), share_(share) {
        const auto size = pieces_.size();
        const auto heads = num_heads(pieces_[rank]);
        rows_at_once_ = std::max<std::int64_t>(WEIGHED / std::max<std::int64_t>(heads, 1), 1);
        lse_.resize(size * rows_at_once_ * heads);
        values_.resize(size);
        weights_.resize((size + 2) * rows_at_once_ * heads);
    }

    std::uint64_t rounds() const override {
        std::uint64_t most = 0;
        for (const auto& piece : pieces_) most = std::max(most, in_rounds(piece).count());
        return most;
    }
    std::uint64_t bytes_for(int reader) const override {
        return pieces_[reader].num_rows * row_bytes(pieces_[reader]);
    }
    std::uint64_t bytes_from(int) const override { return bytes_for(rank_); }

    void put(std::uint64_t round, std::byte* slot) override {
        for (int j = 0; j < static_cast<int>(pieces_.size()); ++j) {
            if (j != rank_) put_piece(pieces_[j], in_rounds(pieces_[j]), round, slot + j * share_);
        }
    }

    void take(std::uint64_t round, const std::byte* const* slots) override {
        const Pieces rows = in_rounds(pieces_[rank_]);
        for (std::int64_t i = 0; i < rows.size(round); i += rows_at_once_) {
            take_rows(slots, i, rows.begin(round) + i, std::min(rows_at_once_, rows.size(round) - i));
        }
    }

private:
    static constexpr std::int64_t WEIGHED = 128;  // heads of rows: enough for vectors, and few to keep

    // Merges `count` rows of this rank's piece, from `row` on; slots have them from their `first` on.
    void take_rows(const std::byte* const* slots, std::int64_t first, std::int64_t row,
                   std::int64_t count) {
        const Piece& mine = pieces_[rank_];
        const int ranks = static_cast<int>(pieces_.size());
        const std::int64_t heads = num_heads(mine), bytes = row_bytes(mine);
        const auto packed = [&](int r, std::int64_t i) {
            return slots[r] + rank_ * share_ + (first + i) * bytes;
        };
        for (int r = 0; r < ranks; ++r) {
            for (std::int64_t i = 0; i < count; ++i) {
                const auto* const lse = r == rank_ ? lse_at(mine, row + i)
                                                   : reinterpret_cast<const float*>(packed(r, i));
                std::copy_n(lse, heads, lse_.data() + (r * count + i) * heads);
            }
        }
        find_weights(lse_.data(), ranks, count * heads, weights_.data());
        const std::int64_t out_bytes = mine.num_columns * bytes_of(partials_.dtype);
        for (std::int64_t i = 0; i < count; ++i) {
            for (int r = 0; r < ranks; ++r) {
                values_[r] = r == rank_ ? out_at(mine, row + i) : packed(r, i) + heads * sizeof(float);
            }
            const ShardedRow sharded{.dtype = partials_.dtype,
                                     .ranks = ranks,
                                     .values = values_.data(),
                                     .weights = weights_.data() + i * heads,
                                     .weight_stride = count * heads,
                                     .first_column = mine.first_column % partials_.head_dim,
                                     .columns = mine.num_columns,
                                     .head_dim = partials_.head_dim};
            merge(sharded, out_ + (row + i) * out_bytes);
        }
    }

    std::int64_t first_head(const Piece& piece) const { return piece.first_column / partials_.head_dim; }
    std::int64_t num_heads(const Piece& piece) const {
        if (piece.num_columns == 0) return 0;
        return ceil_div(piece.first_column + piece.num_columns, partials_.head_dim) - first_head(piece);
    }
    std::int64_t row_bytes(const Piece& piece) const {
        const std::int64_t lse_bytes = num_heads(piece) * static_cast<std::int64_t>(sizeof(float));
        return ceil_div(lse_bytes + piece.num_columns * bytes_of(partials_.dtype), 4) *
               4;  // floats are aligned
    }
    Pieces in_rounds(const Piece& piece) const {
        const std::int64_t bytes = row_bytes(piece);
        return {bytes == 0 ? 0 : piece.num_rows, bytes == 0 ? 1 : share_ / bytes};
    }

    std::int64_t row_number(const Piece& piece, std::int64_t i) const {
        return piece.rows == nullptr ? piece.first_row + i : piece.rows[i];
    }
    const float* lse_at(const Piece& piece, std::int64_t i) const {
        return partials_.lse + row_number(piece, i) * partials_.lse_row_stride + first_head(piece);
    }
    const std::byte* out_at(const Piece& piece, std::int64_t i) const {
        const std::int64_t element =
            row_number(piece, i) * partials_.out_row_stride + piece.first_column;
        return partials_.out + element * bytes_of(partials_.dtype);
    }

    void put_piece(const Piece& piece, const Pieces& rows, std::uint64_t round, std::byte* to) const {
        const std::int64_t lse_bytes = num_heads(piece) * static_cast<std::int64_t>(sizeof(float));
        for (std::int64_t i = 0; i < rows.size(round); ++i, to += row_bytes(piece)) {
            const std::int64_t row = rows.begin(round) + i;
            copy_bytes(to, reinterpret_cast<const std::byte*>(lse_at(piece, row)), lse_bytes);
            copy_bytes(to + lse_bytes, out_at(piece, row),
                       piece.num_columns * bytes_of(partials_.dtype));
        }
    }

    Partials partials_;
    std::vector<Piece> pieces_;
    int rank_;
    std::byte* out_;
    std::int64_t share_;
    // Of the rows at hand: everybody's LSEs and weights; of one of them, where each rank's values are.
    std::int64_t rows_at_once_;
    std::vector<float> lse_, weights_;
    std::vector<const std::byte*> values_;
};

std::size_t header_bytes(int size) {  // rounds, and the bytes for each reader
    return ceil_div((1 + size) * static_cast<std::int64_t>(sizeof(std::uint64_t)), CACHE_LINE) *
           CACHE_LINE;
}

}  // namespace

ShmGroup::ShmGroup(int file, std::size_t offset, int rank, int size, std::size_t slot_bytes,
                   int host_ranks)
    : meeting_(file, offset, rank, size, header_bytes(size) + slot_bytes, host_ranks),
      header_bytes_(header_bytes(size)) {}

std::size_t ShmGroup::region_bytes(int size, std::size_t slot_bytes) {
    return Meeting::region_bytes(size, header_bytes(size) + slot_bytes);
}

std::size_t ShmGroup::share_bytes() const {
    return (meeting_.slot_bytes() - header_bytes_) / meeting_.size() / CACHE_LINE * CACHE_LINE;
}

void ShmGroup::start_all_gather(const std::byte* mine, const Sizes& sizes, std::byte* out) {
    const auto room = meeting_.slot_bytes() - header_bytes_;
    start(std::make_unique<AllGather>(meeting_.rank(), mine, sizes, out, room));
}

void ShmGroup::start_all_to_all(const Addresses& parts, const Sizes& sent, const Sizes& arriving,
                                std::byte* out) {
    start(std::make_unique<AllToAll>(meeting_.rank(), parts, sent, arriving, out, share_bytes()));
}

void ShmGroup::start_all_reduce(Dtype dtype, const std::byte* mine, std::int64_t count, std::byte* out) {
    const auto room = meeting_.slot_bytes() - header_bytes_;
    const int rank = meeting_.rank(), size = meeting_.size();
    if (size > 2 && count * bytes_of(dtype) > SUMMED_BY_ALL_BYTES) {
        return start(std::make_unique<AllReduceInParts>(dtype, rank, size, mine, count, out, room));
    }
    start(std::make_unique<AllReduce>(dtype, rank, size, mine, count, out, room));
}

void ShmGroup::start_reduce_scatter(Dtype dtype, const std::byte* mine, const Sizes& sizes,
                                    std::byte* out) {
    start(std::make_unique<ReduceScatter>(dtype, meeting_.rank(), mine, sizes, out, share_bytes()));
}

void ShmGroup::start_merge_scatter(const Partials& partials, std::vector<Piece> pieces, std::byte* out) {
    start(std::make_unique<MergeScatter>(partials, std::move(pieces), meeting_.rank(), out,
                                         share_bytes()));
}

void ShmGroup::start(std::unique_ptr<Collective> collective) {
    if (under_way_) throw std::runtime_error("a collective is under way");
    under_way_ = std::move(collective);
    put(0);
}

int ShmGroup::finish(double timeout_s) {
    const std::chrono::duration<double> patience(std::min(timeout_s, FOREVER_S));
    const auto wait = std::chrono::duration_cast<Deadline::duration>(patience);
    const Deadline deadline = std::chrono::steady_clock::now() + wait;
    std::uint64_t rounds = 1;
    for (std::uint64_t round = 0; round < rounds; ++round) {
        if (round > 0) put(round);
        if (const int absent = meeting_.await_others(deadline); absent >= 0) return absent;
        if (round == 0) rounds = agreed_rounds();
        take(round);
    }
    under_way_.reset();
    return -1;
}

void ShmGroup::put(std::uint64_t round) {
    meeting_.next_round();
    std::byte* slot = meeting_.slot(meeting_.rank());
    if (round == 0) {
        auto* header = reinterpret_cast<std::uint64_t*>(slot);
        header[0] = under_way_->rounds();
        for (int j = 0; j < meeting_.size(); ++j) header[1 + j] = under_way_->bytes_for(j);
    }
    under_way_->put(round, slot + header_bytes_);
    meeting_.arrive();
}

void ShmGroup::take(std::uint64_t round) {
    std::vector<const std::byte*> slots(meeting_.size());
    for (int i = 0; i < meeting_.size(); ++i) slots[i] = meeting_.slot(i) + header_bytes_;
    under_way_->take(round, slots.data());
}

std::uint64_t ShmGroup::agreed_rounds() const {
    std::uint64_t rounds = 1;
    for (int i = 0; i < meeting_.size(); ++i) {
        const auto* header = reinterpret_cast<const std::uint64_t*>(meeting_.slot(i));
        const std::uint64_t sent = header[1 + meeting_.rank()], agreed = under_way_->bytes_from(i);
        if (sent != agreed) {
            throw std::runtime_error("rank " + std::to_string(i) + " of the group came with " +
                                     std::to_string(sent) + " bytes where " + std::to_string(agreed) +
                                     " were agreed");
        }
        rounds = std::max(rounds, header[0]);
    }
    return rounds;
}

}  // namespace kvspan
