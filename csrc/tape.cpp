#include "tape.h"

#include <algorithm>
#include <chrono>

#include "parallel.h"

namespace kvspan {
namespace {

constexpr std::size_t SOON_BYTES = 24 << 20;  // stay in a cache of 32 MiB; of 12 to 28 as fast as any

double now_s() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
}

}  // namespace

Tape*& Tape::recording() {
    static thread_local Tape* tape = nullptr;
    return tape;
}

void Tape::keep(Work work, std::function<void()> call, std::initializer_list<const void*> brought,
                std::vector<Memory> weights) {
    calls_.push_back({work, std::move(call), std::move(weights), {}});
    is_whole_ &=
        std::all_of(brought.begin(), brought.end(), [&](const void* at) { return is_input(at); });
}

void Tape::stop() {
    recording() = nullptr;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
        if (calls_[i].work == Work::attention) calls_[i].soon = read_behind(i);
    }
}

std::vector<Memory> Tape::read_behind(std::size_t call) const {
    std::vector<Memory> soon;
    std::size_t left = SOON_BYTES;
    for (std::size_t i = call + 1; i < calls_.size() && calls_[i].work != Work::attention; ++i) {
        for (const Memory& weight : calls_[i].weights) {
            const std::size_t bytes = std::min(weight.bytes, left);
            if (bytes > 0) soon.push_back({weight.begin, bytes});
            left -= bytes;
        }
    }
    return soon;
}

void Tape::make(const Call& call) {
    struct Told {
        explicit Told(const std::vector<Memory>& soon) { read_soon() = &soon; }
        ~Told() { read_soon() = nullptr; }
    } const told(call.soon);
    call.make();
}

void Tape::play(int threads) const {
    as_a_team(threads, [&] {
        for (const Call& call : calls_) make(call);
    });
}

std::vector<Timed> Tape::play_timed(int threads) const {
    std::vector<Timed> times;
    times.reserve(calls_.size());
    as_a_team(threads, [&] {
        for (const Call& call : calls_) {
            const double start_s = now_s();
            make(call);
            times.push_back({call.work, start_s, now_s()});
        }
    });
    return times;
}

// A call for no rows reads nothing, nowhere.
bool Tape::is_input(const void* address) const {
    if (address == nullptr) return true;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    return std::any_of(inputs_.begin(), inputs_.end(), [at](const Memory& memory) {
        return at >= memory.begin && at - memory.begin < memory.bytes;
    });
}

}  // namespace kvspan
