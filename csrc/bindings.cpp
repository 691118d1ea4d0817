// The border to Python, which hands over addresses, sizes and strides; nothing but the files of this name
// knows Python.
#include "bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention.h"
#include "best.h"
#include "draw.h"
#include "isa.h"
#include "pages.h"
#include "reduce.h"
#include "store.h"
#include "tape.h"

namespace nb = nanobind;
using namespace kvspan;

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

    // clang-format off
    m.def("attend", [](Isa isa, Dtype dtype, Dtype stored, int threads, float scale,
                       Address query, Size query_row, Size query_head,
                       Address keys, Size key_block, Size key_head, Size key_slot,
                       Address key_scales, Size key_scale_block, Size key_scale_head,
                       Size key_scale_slot,
                       Address values, Size value_block, Size value_head, Size value_slot,
                       Address value_scales, Size value_scale_block, Size value_scale_head,
                       Size value_scale_slot,
                       int heads, int kv_heads, int head_dim, int value_dim, int block_size,
                       int first_part,
                       Size sequences, Address row_starts, Address table_starts, Address tables,
                       Address first, Address last, Address out, Address lse) {
        // clang-format on
        const Attention call{
            .dtype = dtype,
            .stored = stored,
            .query = at<void>(query),
            .query_row_stride = query_row,
            .query_head_stride = query_head,
            .keys = {at<void>(keys),
                     key_block,
                     key_head,
                     key_slot,
                     {at<const std::uint16_t>(key_scales), key_scale_block, key_scale_head,
                      key_scale_slot}},
            .values = {at<void>(values),
                       value_block,
                       value_head,
                       value_slot,
                       {at<const std::uint16_t>(value_scales), value_scale_block, value_scale_head,
                        value_scale_slot}},
            .heads = heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .value_dim = value_dim,
            .block_size = block_size,
            .part_dims = {first_part, head_dim - first_part},
            .sequences = sequences,
            .row_starts = at<const Size>(row_starts),
            .table_starts = at<const Size>(table_starts),
            .tables = at<const Size>(tables),
            .first = at<const Size>(first),
            .last = at<const Size>(last),
            .scale = scale,
            .out = at<void>(out),
            .lse = at<float>(lse),
        };
        const Kernel kernel = attention_kernel(isa, dtype, stored);
        nb::gil_scoped_release others_may_run;
        made(Work::attention, [=] { attend(call, kernel, threads); },
             {call.row_starts, call.table_starts, call.tables, call.first, call.last});
    });

    // clang-format off
    m.def("store", [](Dtype dtype, Dtype stored, int threads, Address rows, Size row_stride,
                      Size head_stride, int heads, int first_part, int second_part,
                      Size count, Address blocks, Address offsets,
                      Address data, Size block, Size head, Size slot,
                      Address scales, Size scale_block, Size scale_head, Size scale_slot) {
        // clang-format on
        const Store call{
            .dtype = dtype,
            .rows = at<void>(rows),
            .row_stride = row_stride,
            .head_stride = head_stride,
            .count = count,
            .blocks = at<const Size>(blocks),
            .offsets = at<const Size>(offsets),
            .heads = heads,
            .part_dims = {first_part, second_part},
            .stored = stored,
            .data = at<void>(data),
            .block_stride = block,
            .slot_head_stride = head,
            .slot_stride = slot,
            .scales = at<std::uint16_t>(scales),
            .scale_block_stride = scale_block,
            .scale_head_stride = scale_head,
            .scale_slot_stride = scale_slot,
        };
        nb::gil_scoped_release others_may_run;
        made(Work::cache, [=] { store(call, threads); }, {call.blocks, call.offsets});
    });

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
        const Best call{at<const float>(logits), rows, stride, size, at<float>(values), at<Size>(places)};
        nb::gil_scoped_release others_may_run;
        made(Work::linear, [=] { find_best(call, threads); });
    });

    bind_experts(m);
    bind_shares(m);

    nb::class_<DrawWeights>(m, "DrawWeights")
        .def(nb::init<Address, Size, Size, Size, Address, Address, Address>())
        .def("totals", &DrawWeights::totals)
        .def("octaves", &DrawWeights::octaves)
        .def("collect", &DrawWeights::collect)
        .def("pick", &DrawWeights::pick);

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
        .def("play", &Tape::play, others_may_run)
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
