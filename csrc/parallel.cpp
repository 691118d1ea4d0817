// Threads come from the OpenMP runtime that the process already has, which is torch's: a second pool
// would fight its threads, which spin between two operators, for the cores. Its entry point is looked up
// by name, so nothing is linked; a process without one gets threads that live for one loop.
#include "parallel.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvspan {
namespace {

using Body = std::function<void(std::int64_t)>;

struct Loop {
    std::int64_t size;
    const Body& body;
    std::atomic<std::int64_t> next{0};

    static void work(void* self) {
        auto& loop = *static_cast<Loop*>(self);
        for (std::int64_t i; (i = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.size;) {
            loop.body(i);
        }
    }
};

using RunTeam = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

RunTeam openmp_team() {
    static const auto team = reinterpret_cast<RunTeam>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return team;
}

void short_lived_team(void (*work)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, data);
    work(data);
    for (auto& other : others) other.join();
}

void run_together(void (*work)(void*), void* data, unsigned threads) {
    (openmp_team() ? openmp_team() : short_lived_team)(work, data, threads, 0);
}

// Waits for what a thread on another core is about to do, and makes way for it if it has none.
class Patience {
public:
    void wait() {
        if (++turns_ > SPINS) {
            sched_yield();
            return;
        }
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

private:
    static constexpr int SPINS = 20'000;  // about 0.5 ms, longer than any call that uses one thread
    int turns_ = 0;
};

// A leader's loops, one at a time. A ticket is the number of a loop and, below it, how many items of it
// nobody has taken; who takes one has to find the ticket as it was. So nobody waits for a thread that
// has not come to a loop, only for items that somebody has taken, and the loop stands still until they
// are done.
class Team {
public:
    void loop(std::int64_t size, const Body& body) {
        body_ = &body;
        size_ = size;
        finished_.store(0, std::memory_order_relaxed);
        const std::uint64_t number = (ticket_.load(std::memory_order_relaxed) >> ITEM_BITS) + 1;
        ticket_.store(number << ITEM_BITS | static_cast<std::uint64_t>(size), std::memory_order_release);
        while (take_item()) {}
        for (Patience patience; finished_.load(std::memory_order_acquire) < size;) patience.wait();
    }

    void follow() {
        for (Patience patience; !is_over_.load(std::memory_order_acquire);) {
            if (take_item()) {
                patience = {};
            } else {
                patience.wait();
            }
        }
    }

    void end() { is_over_.store(true, std::memory_order_release); }

private:
    static constexpr int ITEM_BITS = 32;

    bool take_item() {
        std::uint64_t ticket = ticket_.load(std::memory_order_relaxed);
        do {
            if (static_cast<std::uint32_t>(ticket) == 0) return false;
        } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire,
                                                std::memory_order_relaxed));
        (*body_)(size_ - static_cast<std::uint32_t>(ticket));
        finished_.fetch_add(1, std::memory_order_release);
        return true;
    }

    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    const Body* body_ = nullptr;
    std::int64_t size_ = 0;
    std::atomic<bool> is_over_{false};
    alignas(64) std::atomic<std::int64_t> finished_{0};
};

Team*& own_team() {
    static thread_local Team* team = nullptr;
    return team;
}

struct Together {
    Team team;
    const std::function<void()>& lead;
    std::exception_ptr failure;

    static void work(void* self) {
        auto& together = *static_cast<Together*>(self);
        if (own_team() != &together.team) return together.team.follow();
        try {
            together.lead();
        } catch (...) {  // the runtime that the threads are of knows no exceptions
            together.failure = std::current_exception();
        }
        together.team.end();
    }
};

}  // namespace

void parallel_for(std::int64_t size, int threads, const Body& body) {
    Loop loop{size, body};
    const auto team_size = static_cast<unsigned>(std::min<std::int64_t>(size, threads));
    if (team_size <= 1) return Loop::work(&loop);
    if (own_team()) return own_team()->loop(size, body);
    run_together(Loop::work, &loop, team_size);
}

void as_a_team(int threads, const std::function<void()>& lead) {
    if (threads <= 1 || own_team()) return lead();
    Together together{{}, lead, nullptr};
    own_team() = &together.team;
    run_together(Together::work, &together, static_cast<unsigned>(threads));
    own_team() = nullptr;
    if (together.failure) std::rethrow_exception(together.failure);
}

}  // namespace kvspan
