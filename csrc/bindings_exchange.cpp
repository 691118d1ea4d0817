// What ranks exchange, and their shares of it, for Python.
#include "bindings.h"

#include <nanobind/stl/vector.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "exchange.h"
#include "share.h"
#include "tape.h"

namespace nb = nanobind;

namespace kvspan {
namespace {

// A rank that has not come in time.
class Absent : public std::runtime_error {
public:
    Absent(const Sizes& members, int absent, double timeout_s)
        : std::runtime_error(sentence(members, absent, timeout_s)) {}

private:
    static std::string sentence(const Sizes& members, int absent, double timeout_s) {
        std::ostringstream text;
        text << "Rank " << members[absent] << " has not come to an exchange of ranks ";
        for (std::size_t i = 0; i < members.size(); ++i) text << (i ? ", " : "") << members[i];
        text << " within " << timeout_s << " s.";
        return text.str();
    }
};

}  // namespace

void bind_exchange(nb::module_& m) {
    const auto others_may_run = nb::call_guard<nb::gil_scoped_release>();
    nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
        try {
            std::rethrow_exception(raised);
        } catch (const Absent& absent) {
            PyErr_SetString(PyExc_TimeoutError, absent.what());
        }
    });
    nb::class_<ShmGroup>(m, "ShmGroup")
        .def(nb::init<int, std::size_t, int, int, std::size_t, int>())
        .def_static("region_bytes", &ShmGroup::region_bytes)
        .def("share_bytes", &ShmGroup::share_bytes)
        .def(
            "start_all_gather",
            [](ShmGroup& group, Address mine, const Sizes& sizes, Address out) {
                made(Work::exchange, [=, &group] {
                    group.start_all_gather(at<std::byte>(mine), sizes, at<std::byte>(out));
                });
            },
            others_may_run)
        .def(
            "start_all_to_all",
            [](ShmGroup& group, const Addresses& parts, const Sizes& sent, const Sizes& arriving,
               Address out) {
                made(Work::exchange, [=, &group] {
                    group.start_all_to_all(parts, sent, arriving, at<std::byte>(out));
                });
            },
            others_may_run)
        .def(
            "start_all_reduce",
            [](ShmGroup& group, Dtype dtype, Address mine, Size count, Address out) {
                made(Work::exchange, [=, &group] {
                    group.start_all_reduce(dtype, at<std::byte>(mine), count, at<std::byte>(out));
                });
            },
            others_may_run)
        .def(
            "start_reduce_scatter",
            [](ShmGroup& group, Dtype dtype, Address mine, const Sizes& sizes, Address out) {
                made(Work::exchange, [=, &group] {
                    group.start_reduce_scatter(dtype, at<std::byte>(mine), sizes, at<std::byte>(out));
                });
            },
            others_may_run)
        .def(
            "start_merge_scatter",
            [](ShmGroup& group, Dtype dtype, Address partial, Size partial_row, Address lse,
               Size lse_row, Size head_dim, const Sizes& pieces, Address out) {
                const Partials partials{dtype,          at<std::byte>(partial), partial_row,
                                        at<float>(lse), lse_row,                head_dim};
                made(Work::exchange, [=, &group, pieces = pieces_of(pieces)] {
                    group.start_merge_scatter(partials, pieces, at<std::byte>(out));
                });
            },
            others_may_run)
        .def(
            "finish",
            [](ShmGroup& group, double timeout_s, const Sizes& members) {
                made(Work::exchange, [=, &group] {
                    const int absent = group.finish(timeout_s);
                    if (absent >= 0) throw Absent(members, absent, timeout_s);
                });
            },
            others_may_run);

    m.def("take_share", [](Dtype dtype, Address out, Size rows, Size heads, Size head_dim, Address lse,
                           int ranks, int rank, const Sizes& pieces, Address weights, Address to) {
        const Share call{.dtype = dtype,
                         .out = at<const std::byte>(out),
                         .rows = rows,
                         .heads = heads,
                         .head_dim = head_dim,
                         .lse = at<const float>(lse),
                         .ranks = ranks,
                         .rank = rank,
                         .pieces = pieces_of(pieces),
                         .weights = at<float>(weights),
                         .to = at<float>(to)};
        nb::gil_scoped_release others_may_run;
        made(Work::exchange, [=] { take_share(call); });
    });
    m.def("round_to", [](Dtype dtype, Address from, Size count, Address to) {
        nb::gil_scoped_release others_may_run;
        made(Work::exchange, [=] { round_to(dtype, at<const float>(from), count, at<std::byte>(to)); });
    });
}

}  // namespace kvspan
