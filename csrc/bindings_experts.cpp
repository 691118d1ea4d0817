// Experts and the ways to them, for Python.
#include "bindings.h"

#include <nanobind/stl/vector.h>

#include <memory>

#include "experts.h"
#include "isa.h"
#include "routing.h"
#include "tape.h"

namespace nb = nanobind;

namespace kvspan {
namespace {

// What a rank keeps of a layer's experts; tapes that have visits to them keep it as well.
class KeptExperts {
public:
    KeptExperts(Isa isa, Size first, Size count, Size hidden, Size inner, Size first_inner,
                Size some_inner, Address gate_up, Address down)
        : experts_(std::make_shared<const Experts>(
              Experts{first, count, hidden, inner, first_inner, some_inner, at<const std::byte>(gate_up),
                      at<const std::byte>(down), linear_kernel(isa)})) {}

    void operator()(int threads, Address x, Size rows, Size row_stride, Address chosen, Address weights,
                    int per_row, Address shared, Address gate, Address gathered, Address inner,
                    Address out) const {
        const Visits call{.x = at<void>(x),
                          .rows = rows,
                          .row_stride = row_stride,
                          .chosen = at<const Size>(chosen),
                          .weights = at<const float>(weights),
                          .per_row = per_row,
                          .shared = at<void>(shared),
                          .gate = at<void>(gate),
                          .gathered = at<void>(gathered),
                          .inner = at<void>(inner),
                          .out = at<void>(out)};
        made(Work::linear, [call, threads, experts = experts_] { visit(*experts, call, threads); });
    }

private:
    std::shared_ptr<const Experts> experts_;
};

}  // namespace

void bind_experts(nb::module_& m) {
    nb::class_<KeptExperts>(m, "Experts")
        .def(nb::init<Isa, Size, Size, Size, Size, Size, Size, Address, Address>())
        .def("__call__", &KeptExperts::operator(), nb::call_guard<nb::gil_scoped_release>());

    m.def("find_experts", [](int threads, Address logits, Size rows, int experts, Address bias,
                             bool sigmoid, int groups, int groups_per_row, int group_scores, int per_row,
                             bool normalise, double scale, Address chosen, Address weights) {
        const Routing call{.logits = at<const float>(logits),
                           .rows = rows,
                           .experts = experts,
                           .bias = at<const float>(bias),
                           .sigmoid = sigmoid,
                           .groups = groups,
                           .groups_per_row = groups_per_row,
                           .group_scores = group_scores,
                           .per_row = per_row,
                           .normalise = normalise,
                           .scale = scale,
                           .chosen = at<Size>(chosen),
                           .weights = at<float>(weights)};
        nb::gil_scoped_release others_may_run;
        made(Work::linear, [=] { find_experts(call, threads); });
    });
}

}  // namespace kvspan
