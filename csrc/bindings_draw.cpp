// What tokens are drawn by, for Python.
#include "bindings.h"

#include "draw.h"

namespace nb = nanobind;

namespace kvspan {
namespace {

// What tokens are drawn by, see `csrc/draw.h`.
class DrawWeights {
public:
    DrawWeights(std::uintptr_t logits, std::int64_t rows, std::int64_t stride, std::int64_t size,
                std::uintptr_t greatest, std::uintptr_t temperature, std::uintptr_t least)
        : weights_{at<const float>(logits),   rows,
                   stride,                    size,
                   at<const double>(greatest), at<const double>(temperature),
                   at<const double>(least)} {}

    void totals(int threads, std::uintptr_t sums) const {
        nb::gil_scoped_release others_may_run;
        kvspan::totals(weights_, at<double>(sums), threads);
    }

    void octaves(int threads, std::uintptr_t sums, std::uintptr_t counts) const {
        nb::gil_scoped_release others_may_run;
        kvspan::octaves(weights_, at<double>(sums), at<std::int64_t>(counts), threads);
    }

    void collect(int threads, std::uintptr_t last, std::uintptr_t first, std::uintptr_t places,
                 std::uintptr_t weights) const {
        nb::gil_scoped_release others_may_run;
        kvspan::collect(weights_, at<const std::int64_t>(last), at<const std::int64_t>(first),
                        at<std::int64_t>(places), at<double>(weights), threads);
    }

    void pick(int threads, std::uintptr_t goals, std::uintptr_t places) const {
        nb::gil_scoped_release others_may_run;
        kvspan::pick(weights_, at<const double>(goals), at<std::int64_t>(places), threads);
    }

private:
    Weights weights_;
};

}  // namespace

void bind_draw(nb::module_& m) {
    nb::class_<DrawWeights>(m, "DrawWeights")
        .def(nb::init<Address, Size, Size, Size, Address, Address, Address>())
        .def("totals", &DrawWeights::totals)
        .def("octaves", &DrawWeights::octaves)
        .def("collect", &DrawWeights::collect)
        .def("pick", &DrawWeights::pick);
}

}  // namespace kvspan
