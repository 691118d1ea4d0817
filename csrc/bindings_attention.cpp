// Attention, and what puts keys and values into a cache, for Python.
#include "bindings.h"

#include "attention.h"
#include "isa.h"
#include "store.h"
#include "tape.h"

namespace nb = nanobind;

namespace kvspan {

void bind_attention(nb::module_& m) {
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
}

}  // namespace kvspan
