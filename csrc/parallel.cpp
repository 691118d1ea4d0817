// Threads come from the OpenMP runtime that the process already has, which is torch's: a second pool
// would fight its threads, which spin between two operators, for the cores. Its entry point is looked up
// by name, so nothing is linked; a process without one gets threads that live for one loop.
#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace kvspan {
namespace {

struct Loop {
    std::int64_t size;
    const std::function<void(std::int64_t)>& body;
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

}  // namespace

void parallel_for(std::int64_t size, int threads, const std::function<void(std::int64_t)>& body) {
    Loop loop{size, body};
    const auto team_size = static_cast<unsigned>(std::min<std::int64_t>(size, threads));
    if (team_size <= 1) return Loop::work(&loop);
    const RunTeam run = openmp_team() ? openmp_team() : short_lived_team;
    run(Loop::work, &loop, team_size, 0);
}

}  // namespace kvspan
