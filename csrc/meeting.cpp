#include "meeting.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace kvspan {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int SPINS = 40;                      // some microseconds: a pause may take 100 ns
constexpr auto PATIENCE = microseconds(1000);  // of yielding, before it sleeps
constexpr auto CROWDED_PATIENCE = microseconds(200);
constexpr auto NAP = microseconds(100'000);  // then it looks at the clock again
constexpr std::size_t PAGE = 1 << 16;        // of any machine

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

int cores() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    return static_cast<int>(std::thread::hardware_concurrency());
}

// Sleeps while `word` is `seen`, for a nap at the most.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t seen, microseconds nap) {
#if defined(__linux__)
    const timespec time{.tv_sec = 0, .tv_nsec = nap.count() * 1000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
    if (word.load() == seen) std::this_thread::sleep_for(std::min(nap, microseconds(50)));
#endif
}

void wake_all([[maybe_unused]] std::atomic<std::uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

SharedMemory::SharedMemory(int file, std::size_t offset, std::size_t bytes) : bytes_(bytes) {
    // Unlike ftruncate, this never shortens a file that another rank has lengthened in the meantime.
    const char nothing = 0;
    if (pwrite(file, &nothing, 1, static_cast<off_t>(offset + bytes - 1)) != 1) {
        throw std::system_error(errno, std::generic_category(), "shared memory cannot grow");
    }
    void* data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
    if (data == MAP_FAILED)
        throw std::system_error(errno, std::generic_category(), "shared memory cannot be mapped");
    data_ = static_cast<std::byte*>(data);
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

std::size_t Meeting::region_bytes(int size, std::size_t slot_bytes) {
    return rounded_up(size * (sizeof(Line) + 2 * slot_bytes) + 1, PAGE);
}

Meeting::Meeting(int file, std::size_t offset, int rank, int size, std::size_t slot_bytes,
                 int host_ranks)
    : rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      crowded_(host_ranks > cores()),
      memory_(file, offset, region_bytes(size, slot_bytes)) {
    static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "ranks share no locks");
}

std::byte* Meeting::slot(int rank) const {
    const std::size_t number = 2 * static_cast<std::size_t>(rank) + round_ % 2;
    return memory_.data() + size_ * sizeof(Line) + number * slot_bytes_;
}

void Meeting::arrive() {
    Line& mine = line(rank_);
    mine.arrived.store(
        round_);  // sequentially consistent, and so is the next: one of the two sides sees the other
    if (mine.sleepers.load() != 0) wake_all(mine.arrived);
}

int Meeting::await_others(Deadline deadline) {
    for (int i = 1; i < size_; ++i) {
        const int other = (rank_ + i) % size_;
        if (!await(other, deadline)) return other;
    }
    return -1;
}

bool Meeting::has_come(int rank) const {
    const std::uint32_t ahead = line(rank).arrived.load(std::memory_order_acquire) - round_;
    return static_cast<std::int32_t>(ahead) >= 0;  // also when the numbers have gone round
}

bool Meeting::await(int rank, Deadline deadline) const {
    for (int i = crowded_ ? SPINS : 0; i < SPINS; ++i) {
        if (has_come(rank)) return true;
        relax();
    }
    if (has_come(rank)) return true;
    const auto tired = std::min(deadline, Clock::now() + (crowded_ ? CROWDED_PATIENCE : PATIENCE));
    do {
        sched_yield();
        if (has_come(rank)) return true;
    } while (Clock::now() < tired);
    while (!has_come(rank)) {
        if (Clock::now() >= deadline) return false;
        sleep_until_told(rank, deadline);
    }
    return true;
}

void Meeting::sleep_until_told(int rank, Deadline deadline) const {
    Line& other = line(rank);
    other.sleepers.fetch_add(1);
    const std::uint32_t seen = other.arrived.load();
    if (static_cast<std::int32_t>(seen - round_) < 0) {
        const auto left = std::chrono::duration_cast<microseconds>(deadline - Clock::now());
        sleep_while(other.arrived, seen, std::clamp(left, microseconds(1), NAP));
    }
    other.sleepers.fetch_sub(1);
}

}  // namespace kvspan
