// Loops over threads: every item once, whoever leads them.
#include <atomic>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "parallel.h"
#include "tape.h"

namespace kvspan::check {
namespace {

// Loops of all sizes, one right behind the other, so that threads come late to most of them.
double items_missed(Random& random, int threads, bool as_team) {
    double missed = 0;
    const auto loops = [&] {
        for (int n = 0; n < 2000; ++n) {
            std::vector<std::atomic<int>> times(pick(random, 0, 20));
            parallel_for(std::ssize(times), threads, [&](std::int64_t i) { ++times[i]; });
            for (const auto& each : times) missed += each != 1;
        }
    };
    as_team ? as_a_team(threads, loops) : loops();
    return missed;
}

bool fails_as_its_leader_does(int threads) {
    try {
        as_a_team(threads, [] { throw std::runtime_error("as wanted"); });
    } catch (const std::runtime_error&) {
        return true;
    }
    return false;
}

bool plays_what_it_kept() {
    std::vector<int> noted;
    int input = 1, elsewhere = 1;
    Tape tape({{reinterpret_cast<std::uintptr_t>(&input), sizeof input}});
    made(Work::rows, [&] { noted.push_back(0); });
    tape.record();
    made(Work::rows, [&] { noted.push_back(input); }, {&input});
    tape.stop();
    made(Work::rows, [&] { noted.push_back(0); });
    input = 2;
    tape.play(3);
    const bool whole = tape.is_whole();
    tape.record();
    made(Work::rows, [] {}, {&elsewhere});
    tape.stop();
    return noted == std::vector{0, 1, 0, 2} && whole && !tape.is_whole();
}

}  // namespace

int check_parallel() {
    int wrong = 0;
    for (const bool as_team : {false, true}) {
        Random random(7);
        double missed = 0;
        for (int threads = 1; threads < 5; ++threads) missed += items_missed(random, threads, as_team);
        wrong += judge(as_team ? "loops of a team" : "loops", missed, 0);
    }
    wrong +=
        judge("failure of a leader", !fails_as_its_leader_does(1) + !fails_as_its_leader_does(3), 0);
    return wrong + judge("tape", !plays_what_it_kept(), 0);
}

}  // namespace kvspan::check
