// Calls of kernels that are kept, to be made again in the same order with no Python between them: most
// steps do what the step before did. A call is kept with all its sizes and addresses, so what a step
// brings has to lie where it lay before; a tape knows that memory, and tells if a call read it
// elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

#include "soon.h"

namespace kvspan {

// What the time of a call counts as.
enum class Work { attention, cache, linear, rows, exchange };

// When a call was made, by the steady clock.
struct Timed {
    Work work;
    double start_s, stop_s;
};

class Tape {
public:
    // `inputs` is the memory of what a step brings.
    explicit Tape(std::vector<Memory> inputs) : inputs_(std::move(inputs)) {}

    // Calls of this thread are kept from here on; and no longer.
    void record() { recording() = this; }
    void stop();

    // The tape that keeps this thread's calls, or null.
    static Tape*& recording();

    // `brought` are the addresses at which the call reads what a step brings; `weights` is what else it
    // reads, the same in all steps.
    void keep(Work work, std::function<void()> call, std::initializer_list<const void*> brought,
              std::vector<Memory> weights);

    // Whether every call read what a step brings from the inputs: it can then be made for another step.
    bool is_whole() const { return is_whole_; }
    std::size_t num_calls() const { return calls_.size(); }

    // Makes all calls in order, on the same threads.
    void play(int threads) const;
    std::vector<Timed> play_timed(int threads) const;

private:
    struct Call {
        Work work;
        std::function<void()> make;
        std::vector<Memory> weights;
        std::vector<Memory> soon;  // of attention: what is read behind it
    };

    static void make(const Call& call);

    bool is_input(const void* address) const;
    std::vector<Memory> read_behind(std::size_t call) const;

    std::vector<Memory> inputs_;
    std::vector<Call> calls_;
    bool is_whole_ = true;
};

// Makes a call, which is kept if this thread records.
template <class Call>
void made(Work work, const Call& call, std::initializer_list<const void*> brought = {},
          std::vector<Memory> weights = {}) {
    call();
    if (Tape* const tape = Tape::recording()) tape->keep(work, call, brought, std::move(weights));
}

}  // namespace kvspan
