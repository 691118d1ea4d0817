// What files that know Python share. Addresses, sizes and strides cross the border, nothing else.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "exchange.h"

namespace kvspan {

using Address = std::uintptr_t;
using Size = std::int64_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Five numbers each: the address of row numbers or 0, the first row, rows, the first column, columns.
inline std::vector<Piece> pieces_of(const Sizes& numbers) {
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i + 5 <= numbers.size(); i += 5) {
        const auto* n = &numbers[i];
        pieces.push_back({at<const std::int64_t>(n[0]), n[1], n[2], n[3], n[4]});
    }
    return pieces;
}

// What each `bindings_*.cpp` adds to the module.
void bind_attention(nanobind::module_& m);
void bind_exchange(nanobind::module_& m);
void bind_layers(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_draw(nanobind::module_& m);
void bind_tape(nanobind::module_& m);

}  // namespace kvspan
