// Tapes of calls, for Python.
#include "bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "tape.h"

namespace nb = nanobind;

namespace kvspan {

void bind_tape(nb::module_& m) {
    nb::enum_<Work>(m, "Work")
        .value("attention", Work::attention)
        .value("cache", Work::cache)
        .value("linear", Work::linear)
        .value("rows", Work::rows)
        .value("exchange", Work::exchange);
    nb::class_<Tape>(m, "Tape")
        .def("__init__",
             [](Tape* tape, const std::vector<std::pair<Address, std::size_t>>& inputs) {
                 std::vector<Memory> memory;
                 for (const auto& [begin, bytes] : inputs) memory.push_back({begin, bytes});
                 new (tape) Tape(std::move(memory));
             })
        .def("record", &Tape::record)
        .def("stop", &Tape::stop)
        .def("is_whole", &Tape::is_whole)
        .def("num_calls", &Tape::num_calls)
        .def("play", &Tape::play, nb::call_guard<nb::gil_scoped_release>())
        .def("play_timed", [](const Tape& tape, int threads) {
            std::vector<Timed> times;
            {
                nb::gil_scoped_release others_may_run;
                times = tape.play_timed(threads);
            }
            std::vector<std::tuple<Work, double, double>> found;
            for (const Timed& each : times) found.emplace_back(each.work, each.start_s, each.stop_s);
            return found;
        });
}

}  // namespace kvspan
