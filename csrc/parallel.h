// Loops over threads.
#pragma once

#include <cstdint>
#include <functional>

namespace kvspan {

// Calls `body(i)` once for every i in [0, size), on at most `threads` threads, in no order.
void parallel_for(std::int64_t size, int threads, const std::function<void(std::int64_t)>& body);

}  // namespace kvspan
