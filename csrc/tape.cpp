#include "tape.h"

#include <algorithm>
#include <chrono>

#include "parallel.h"

namespace kvspan {
namespace {

double now_s() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
}

}  // namespace

Tape*& Tape::recording() {
    static thread_local Tape* tape = nullptr;
    return tape;
}

void Tape::keep(Work work, std::function<void()> call, std::initializer_list<const void*> brought) {
    calls_.push_back({work, std::move(call)});
    is_whole_ &= std::all_of(brought.begin(), brought.end(), [&](const void* at) { return is_input(at); });
}

void Tape::play(int threads) const {
    as_a_team(threads, [&] {
        for (const Call& call : calls_) call.make();
    });
}

std::vector<Timed> Tape::play_timed(int threads) const {
    std::vector<Timed> times;
    times.reserve(calls_.size());
    as_a_team(threads, [&] {
        for (const Call& call : calls_) {
            const double start_s = now_s();
            call.make();
            times.push_back({call.work, start_s, now_s()});
        }
    });
    return times;
}

bool Tape::is_input(const void* address) const {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    return std::any_of(inputs_.begin(), inputs_.end(), [at](const Memory& memory) {
        return at >= memory.begin && at - memory.begin < memory.bytes;
    });
}

}  // namespace kvspan
