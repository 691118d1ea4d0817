// Collectives of the ranks of one host. A collective is what a rank writes for the others, in pieces as
// large as a slot, and what it makes of what they have written: it copies, sums in order of rank, or
// merges attention. Sums and merges are made in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "meeting.h"

namespace kvspan {

// One rank's side of a collective. All ranks make the same ones in the same order.
class Collective {
public:
    virtual ~Collective() = default;

    // Rounds that this rank needs; the group takes as many as the rank that needs most.
    virtual std::uint64_t rounds() const = 0;
    // Bytes that `reader` is to find in all, and that this rank expects of `writer`: they have to agree.
    virtual std::uint64_t bytes_for(int reader) const = 0;
    virtual std::uint64_t bytes_from(int writer) const = 0;
    // Writes the piece of a round.
    virtual void put(std::uint64_t round, std::byte* slot) = 0;
    // Takes what everybody has put in a round; `slots` are the ranks', in order.
    virtual void take(std::uint64_t round, const std::byte* const* slots) = 0;
};

// A part of the attention output that one rank will own: some rows times columns of the flat [heads *
// dim].
struct Piece {
    const std::int64_t* rows;  // their numbers; null = consecutive ones
    std::int64_t first_row, num_rows, first_column, num_columns;
};

// This rank's partial attention, [rows, heads * dim] and [rows, heads].
struct Partials {
    Dtype dtype;
    const std::byte* out;
    std::int64_t out_row_stride;  // elements
    const float* lse;             // not finite = no key seen
    std::int64_t lse_row_stride;
    std::int64_t head_dim;
};

using Addresses = std::vector<std::int64_t>;
using Sizes = std::vector<std::int64_t>;

// A group of processes. One collective is under way at a time: `start` it, then `finish` it.
class ShmGroup {
public:
    ShmGroup(int file, std::size_t offset, int rank, int size, std::size_t slot_bytes, int host_ranks);

    // Bytes of the file that a group takes.
    static std::size_t region_bytes(int size, std::size_t slot_bytes);

    // Bytes of a slot that one reader has when every reader is written something else.
    std::size_t share_bytes() const;

    // `out` receives sizes[i] bytes of each rank i, one behind the other.
    void start_all_gather(const std::byte* mine, const Sizes& sizes, std::byte* out);
    // Sends sent[j] bytes at parts[j] to rank j; `out` receives arriving[i] bytes of each rank i.
    void start_all_to_all(const Addresses& parts, const Sizes& sent, const Sizes& arriving,
                          std::byte* out);
    // Sums `count` elements into `out`, which may be `mine`.
    void start_all_reduce(Dtype dtype, const std::byte* mine, std::int64_t count, std::byte* out);
    // Sums sizes[rank] elements, those of `mine` that are this rank's.
    void start_reduce_scatter(Dtype dtype, const std::byte* mine, const Sizes& sizes, std::byte* out);
    // Merges this rank's piece of everybody's partials into `out`, [rows, columns].
    void start_merge_scatter(const Partials& partials, std::vector<Piece> pieces, std::byte* out);

    // Waits for the others and takes what they brought. Returns the rank that has not come in time, or
    // -1; throws std::runtime_error if ranks do not agree on what they exchange.
    int finish(double timeout_s);

private:
    void start(std::unique_ptr<Collective> collective);
    void put(std::uint64_t round);
    void take(std::uint64_t round);
    std::uint64_t agreed_rounds() const;

    Meeting meeting_;
    std::size_t header_bytes_;
    std::unique_ptr<Collective> under_way_;
};

}  // namespace kvspan
