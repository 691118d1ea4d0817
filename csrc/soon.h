// Memory that is read next. Attention of many heads multiplies for longer than it reads, and meanwhile asks
// for what comes behind it: weights then come out of the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvspan {

struct Memory {
    std::uintptr_t begin;
    std::size_t bytes;
};

constexpr std::int64_t SOON_LINES = 512;  // of 64 bytes, beside a tile: half as many as memory could bring

// What is asked for beside the last tiles of a call, SOON_LINES a tile, so that it is still there.
struct Soon {
    const Memory* parts = nullptr;
    std::size_t count = 0;
    std::int64_t first_tile = 0;  // of the call's, beside which the first lines are asked for

    std::int64_t tiles() const {
        std::int64_t lines = 0;
        for (std::size_t i = 0; i < count; ++i) lines += static_cast<std::int64_t>(parts[i].bytes / 64);
        return lines / SOON_LINES;
    }

    // The lines beside a tile; fewer where a part of the memory ends.
    Memory beside(std::int64_t tile) const {
        if (tile < first_tile) return {};
        std::size_t skipped = static_cast<std::size_t>(tile - first_tile) * SOON_LINES * 64;
        for (std::size_t i = 0; i < count; skipped -= parts[i++].bytes) {
            if (skipped >= parts[i].bytes) continue;
            const std::size_t left = parts[i].bytes - skipped, most = SOON_LINES * 64;
            return {parts[i].begin + skipped, left < most ? left : most};
        }
        return {};
    }
};

// What the calls behind the present one read, as far as this thread knows.
inline const std::vector<Memory>*& read_soon() {
    static thread_local const std::vector<Memory>* soon = nullptr;
    return soon;
}

}  // namespace kvspan
