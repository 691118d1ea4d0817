// Where the ranks of a group meet: a region of memory that all of them have mapped.
//
//     line of rank 0 | line of rank 1 | ...      how many rounds each rank has come to
//     slots of rank 0 | slots of rank 1 | ...    two each, written by that rank and read by the others
//
// In round n a rank writes its slot n % 2, says that it has come, waits for the others and reads theirs.
// Who has come to round n + 1 has read all of round n, so a slot is free again when everybody has come
// to the round behind it: one barrier a round is enough.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvspan {

constexpr std::size_t CACHE_LINE = 64;

using Deadline = std::chrono::steady_clock::time_point;

// A part of a file, mapped while this lives and shared with all who map it.
class SharedMemory {
public:
    // Lengthens the file if need be; throws std::system_error.
    SharedMemory(int file, std::size_t offset, std::size_t bytes);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    std::byte* data() const { return data_; }

private:
    std::byte* data_;
    std::size_t bytes_;
};

class Meeting {
public:
    // `offset` is a sum of `region_bytes`, the same for all ranks of the group and nobody else's.
    // `host_ranks` are all ranks of the host, of whatever groups.
    Meeting(int file, std::size_t offset, int rank, int size, std::size_t slot_bytes, int host_ranks);

    // Bytes of the file that a group takes: whole pages, the last byte never used.
    static std::size_t region_bytes(int size, std::size_t slot_bytes);

    int rank() const { return rank_; }
    int size() const { return size_; }
    std::size_t slot_bytes() const { return slot_bytes_; }

    // The slot of a rank in the present round.
    std::byte* slot(int rank) const;

    // Begins the next round: from here on `slot(rank())` may be written.
    void next_round() { ++round_; }

    // Says that what this rank has to say in this round stands in its slot.
    void arrive();

    // Waits for the others; the rank that has not come by the deadline, or -1 when all have.
    int await_others(Deadline deadline);

private:
    struct alignas(2 * CACHE_LINE) Line {  // processors fetch lines in pairs
        std::atomic<std::uint32_t> arrived;
        std::atomic<std::uint32_t> sleepers;
    };

    Line& line(int rank) const { return reinterpret_cast<Line*>(memory_.data())[rank]; }
    bool has_come(int rank) const;
    bool await(int rank, Deadline deadline) const;
    void sleep_until_told(int rank, Deadline deadline) const;

    int rank_, size_;
    std::size_t slot_bytes_;
    bool crowded_;  // more ranks than cores: who spins keeps others from coming
    std::uint32_t round_ = 0;
    SharedMemory memory_;
};

}  // namespace kvspan
