// Loops over threads.
#pragma once

#include <cstdint>
#include <functional>

namespace kvspan {

// Calls `body(i)` once for every i in [0, size), on at most `threads` threads, in no order.
void parallel_for(std::int64_t size, int threads, const std::function<void(std::int64_t)>& body);

// Calls `lead` on this thread, while `threads` - 1 others wait for the loops that it comes to and share
// them. To begin a loop is then a matter of a store that the others see, and not of calling them
// together.
void as_a_team(int threads, const std::function<void()>& lead);

}  // namespace kvspan
