// How memory is backed.
#pragma once

#include <cstddef>

namespace kvspan {

// Asks for huge pages under memory that has not been touched yet: reading it in a long run then misses
// the TLB seldom, which is worth half of the bandwidth under virtualisation. Without them all works too.
void prefer_huge_pages(void* memory, std::size_t size);

}  // namespace kvspan
