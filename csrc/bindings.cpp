// The border to Python, which hands over addresses, sizes and strides; nothing but the files of this
// name knows Python.
#include "bindings.h"

#include <nanobind/stl/vector.h>

#include "isa.h"
#include "pages.h"

namespace nb = nanobind;
using namespace kvspan;

NB_MODULE(_native, m) {
    nb::enum_<Isa>(m, "Isa")
        .value("portable", Isa::portable)
        .value("avx2", Isa::avx2)
        .value("avx512", Isa::avx512);
    nb::enum_<Dtype>(m, "Dtype")
        .value("f32", Dtype::f32)
        .value("bf16", Dtype::bf16)
        .value("f16", Dtype::f16)
        .value("i8", Dtype::i8)
        .value("e4m3", Dtype::e4m3);
    m.def("available", &available);
    m.def("spin", [](Isa isa, Dtype dtype, std::int64_t rounds) {
        nb::gil_scoped_release others_may_run;
        return spin(isa, dtype, rounds);
    });
    m.def("prefer_huge_pages", [](std::uintptr_t memory, std::size_t size) {
        prefer_huge_pages(at<void>(memory), size);
    });

    bind_attention(m);
    bind_exchange(m);
    bind_layers(m);
    bind_experts(m);
    bind_draw(m);
    bind_tape(m);
}
