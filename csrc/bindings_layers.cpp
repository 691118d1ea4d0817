// Linear layers and what is between them, for Python.
#include "bindings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "best.h"
#include "heads.h"
#include "isa.h"
#include "linear.h"
#include "reduce.h"
#include "rows.h"
#include "tape.h"

namespace nb = nanobind;

namespace kvspan {
namespace {

// A linear layer's weight and bias, bound to the kernel that reads them.
class LinearLayer {
public:
    LinearLayer(Isa isa, std::uintptr_t weight, std::int64_t outputs, std::int64_t inputs,
                std::uintptr_t bias, bool gated)
        : kernel_(linear_kernel(isa)) {
        layer_.weight = at<void>(weight);
        layer_.outputs = outputs;
        layer_.inputs = inputs;
        layer_.panel_pairs = layer_.pairs();
        layer_.gated = gated;
        layer_.bias = at<void>(bias);
        layer_.up_bias = after(layer_.bias, outputs);
    }

    // Some outputs from the first of a panel on, of some inputs from the first of a pair on.
    LinearLayer part(std::int64_t first_output, std::int64_t outputs, std::int64_t first_input,
                     std::int64_t inputs, bool adds_bias) const {
        LinearLayer found = *this;
        const std::int64_t panel = first_output / layer_.panel_outputs();
        const std::int64_t pairs = panel * layer_.panel_pairs + first_input / 2;
        found.layer_.weight = static_cast<const std::uint32_t*>(layer_.weight) + pairs * LINEAR_PANEL;
        found.layer_.bias = adds_bias ? after(layer_.bias, first_output) : nullptr;
        found.layer_.up_bias = adds_bias ? after(layer_.up_bias, first_output) : nullptr;
        found.layer_.outputs = outputs;
        found.layer_.inputs = inputs;
        return found;
    }

    void operator()(int threads, std::uintptr_t input, std::int64_t rows, std::int64_t input_stride,
                    std::uintptr_t out, bool wide) const {
        Linear call = layer_;
        call.input = at<void>(input);
        call.rows = rows;
        call.input_stride = input_stride;
        call.out = at<void>(out);
        call.wide = wide;
        const bool whole = call.pairs() == call.panel_pairs;  // else what is read lies in many places
        const std::size_t bytes = whole ? call.panels() * call.pairs() * LINEAR_PANEL * 4 : 0;
        made(Work::linear, [call, kernel = kernel_, threads] { multiply(call, kernel, threads); }, {},
             {{reinterpret_cast<std::uintptr_t>(call.weight), bytes}});
    }

    void rows(int threads, std::uintptr_t numbers, std::int64_t count, std::int64_t first,
              std::uintptr_t out) const {
        const auto* which = at<const std::int64_t>(numbers);
        const WeightRows call{layer_.weight, layer_.outputs, layer_.inputs, which,
                              count,         first,          at<void>(out)};
        made(Work::linear, [call, threads] { take_rows(call, threads); }, {call.numbers});
    }

private:
    // Of a bias, if there is one, what comes after some outputs.
    static const void* after(const void* bias, std::int64_t outputs) {
        return bias ? static_cast<const std::uint16_t*>(bias) + outputs : nullptr;
    }

    Linear layer_{};
    LinearKernel kernel_;
};

// Each head's matrix.
std::vector<Memory> matrices(const HeadProduct& call, int rows, Dtype dtype) {
    const std::int64_t element = bytes_of(dtype);
    const auto begin = reinterpret_cast<std::uintptr_t>(call.weight);
    std::vector<Memory> memory;
    for (int head = 0; head < call.heads; ++head) {
        memory.push_back({begin + head * call.weight_head_stride * element,
                          static_cast<std::size_t>(rows * call.weight_row_stride * element)});
    }
    return memory;
}

}  // namespace

void bind_layers(nb::module_& m) {
    const auto others_may_run = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<LinearLayer>(m, "LinearLayer")
        .def(nb::init<Isa, Address, Size, Size, Address, bool>())
        .def("__call__", &LinearLayer::operator(), others_may_run)
        .def("part", &LinearLayer::part)
        .def("rows", &LinearLayer::rows, others_may_run);

    m.def("rms_norm", [](Isa isa, Dtype dtype, int threads, Address x, Size rows, Size row_stride,
                         Size head_stride, int heads, Address more, int size, Address weight, float eps,
                         Address out) {
        const RmsNorm call{at<void>(x),    rows, row_stride,       head_stride, heads,
                           at<void>(more), size, at<void>(weight), eps,         at<void>(out)};
        const RowKernels& kernels = row_kernels(isa, dtype);
        nb::gil_scoped_release others_may_run;
        made(Work::rows, [=, &kernels] { run_rows(call, kernels, threads); });
    });
    m.def("silu_mul", [](Isa isa, Dtype dtype, int threads, Address gate_up, Size rows, Size stride,
                         int size, Address out) {
        const SiluMul call{at<void>(gate_up), rows, stride, size, at<void>(out)};
        const RowKernels& kernels = row_kernels(isa, dtype);
        nb::gil_scoped_release others_may_run;
        made(Work::rows, [=, &kernels] { run_rows(call, kernels, threads); });
    });
    m.def("rotate", [](Isa isa, Dtype dtype, int threads, Address x, Size rows, Size row_stride,
                       Size head_stride, int heads, int plain, int dim, bool interleaved, Address cos,
                       Address sin, Address out) {
        const Rotate call{
            .x = at<void>(x),
            .rows = rows,
            .row_stride = row_stride,
            .head_stride = head_stride,
            .heads = heads,
            .plain = plain,
            .dim = dim,
            .interleaved = interleaved,
            .cos = at<const float>(cos),
            .sin = at<const float>(sin),
            .out = at<void>(out),
        };
        const RowKernels& kernels = row_kernels(isa, dtype);
        nb::gil_scoped_release others_may_run;
        made(Work::cache, [=, &kernels] { run_rows(call, kernels, threads); }, {call.cos, call.sin});
    });

    m.def("side_by_side",
          [](int threads, const std::vector<std::tuple<Address, Size, Size>>& parts, Size rows,
             Address out) {
              SideBySide call{{}, rows, at<std::byte>(out)};
              for (const auto& [from, size, stride] : parts) {
                  call.parts.push_back({at<const std::byte>(from), size, stride});
              }
              nb::gil_scoped_release others_may_run;
              made(Work::rows, [=] { run_rows(call, threads); });
          });

    // Sums of a matrix's rows, or dot products with them, by head.
    const auto def_head_product = [&](const char* name, auto multiply, int HeadProduct::* matrix_rows) {
        m.def(name, [=](Isa isa, Dtype dtype, int threads, Address x, Size rows, Size row_stride,
                               Size head_stride, int heads, int inputs, int outputs, Address weight,
                               Size weight_head_stride, Size weight_row_stride, Address out) {
            const HeadProduct call{
                .x = at<void>(x),
                .rows = rows,
                .row_stride = row_stride,
                .head_stride = head_stride,
                .heads = heads,
                .inputs = inputs,
                .outputs = outputs,
                .weight = at<void>(weight),
                .weight_head_stride = weight_head_stride,
                .weight_row_stride = weight_row_stride,
                .out = at<void>(out),
            };
            const HeadKernels& kernels = head_kernels(isa, dtype);
            nb::gil_scoped_release others_may_run;
            made(Work::linear, [=, &kernels] { multiply(call, kernels, threads); }, {},
                 matrices(call, call.*matrix_rows, dtype));
        });
    };
    def_head_product("head_sums", &sum_rows, &HeadProduct::inputs);
    def_head_product("head_dots", &dot_rows, &HeadProduct::outputs);

    m.def("best", [](int threads, Address logits, Size rows, Size stride, Size size, Address values,
                     Address places) {
        const Best call{at<const float>(logits), rows, stride, size, at<float>(values),
                        at<Size>(places)};
        nb::gil_scoped_release others_may_run;
        made(Work::linear, [=] { find_best(call, threads); });
    });
}

}  // namespace kvspan
