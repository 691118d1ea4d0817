"""Native linear layers and row operators against torch, on every instruction set there is."""

import pytest
import torch

from kvspan.config.environment import CPU_ISAS
from kvspan.layers.linear import LINE_BYTES, ColumnLinear, PlainMatrix, Storage, pack
from kvspan.layers.matmul import Arena, PackedProduct, PlainProduct, packed_bytes, packing_isa
from kvspan.layers.rows import MOST_HEAD_ROWS, NativeRowOps, TorchRowOps
from kvspan.testing.cases import DTYPES
from kvspan.topology import Span

SIZES = [8, 40, 576, 1000]


def isas() -> list[str]:
    native = pytest.importorskip("kvspan._native")
    return [isa for isa in CPU_ISAS if native.available(native.Isa[isa])]


@pytest.fixture(params=CPU_ISAS)
def ops(request: pytest.FixtureRequest) -> NativeRowOps:
    if request.param not in isas():
        pytest.skip(f"this build or processor has no {request.param}")
    return NativeRowOps(request.param)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_last_bit(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within a rounding or two of the dtype."""
    assert got.dtype == wanted.dtype
    near = 4 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, wanted, rtol=near, atol=near)


def packed(
    weight: torch.Tensor, bias: torch.Tensor | None, isa: str, *, gated: bool = False
) -> PackedProduct:
    num_bytes = packed_bytes(weight, gated=gated)
    return PackedProduct(weight, bias, gated=gated, memory=Arena(num_bytes).take(num_bytes), isa=isa)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 11, 12, 13, 37, 250])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(8, 1), (40, 17), (41, 33), (576, 100), (1000, 15), (0, 5), (8, 0)]
)
def test_packed_product_equals_float64(isa: str, rows: int, inputs: int, outputs: int) -> None:
    if isa not in isas():
        pytest.skip(f"this build or processor has no {isa}")
    x, weight = randn(rows, inputs + 3).bfloat16()[:, :inputs], randn(outputs, inputs).bfloat16()
    bias = randn(outputs, seed=1).bfloat16()
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(packed(weight, None, isa).wide(x).double(), exact, atol=1e-4, rtol=1e-5)
    wanted = (exact + bias.double()).bfloat16()
    torch.testing.assert_close(packed(weight, bias, isa)(x), wanted, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ((0, 100), (0, 90)),
        ((8, 40), (32, 64)),
        ((7, 40), (5, 90)),
        ((98, 100), (64, 65)),
        ((5, 5), (3, 3)),
    ],
)
def test_parts_of_a_weight_are_multiplied_alone(
    isa: str, inputs: tuple[int, int], outputs: tuple[int, int]
) -> None:
    if isa not in isas():
        pytest.skip(f"this build or processor has no {isa}")
    x, weight = randn(13, 100).bfloat16(), randn(90, 100).bfloat16()
    bias = randn(90, seed=1).bfloat16()
    before, after = slice(*inputs), slice(*outputs)
    for product in (packed(weight, bias, isa), PlainProduct(weight, bias)):
        some = (x.double() @ weight[after].double().T + bias[after].double()).bfloat16()
        torch.testing.assert_close(product.some(x, Span(*outputs)), some, atol=1e-3, rtol=1e-2)
        over = (x[:, before].double() @ weight[:, before].double().T + bias.double()).bfloat16()
        got = product.over(x[:, before], Span(*inputs))
        torch.testing.assert_close(got, over, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 24), (576, 100), (7, 1), (8, 0)])
def test_gated_product_equals_float64(isa: str, inputs: int, outputs: int) -> None:
    if isa not in isas():
        pytest.skip(f"this build or processor has no {isa}")
    x, weight = randn(17, inputs).bfloat16(), (randn(2 * outputs, inputs) / 8).bfloat16()
    bias = randn(2 * outputs, seed=1).bfloat16()
    for added in (bias, None):
        made = x.double() @ weight.double().T + (0.0 if added is None else added.double())
        exact = torch.nn.functional.silu(made[:, :outputs]) * made[:, outputs:]
        wide = packed(weight, added, isa, gated=True).wide(x)
        torch.testing.assert_close(wide.double(), exact, atol=1e-4, rtol=1e-5)
        plain = PlainProduct(weight, added, gated=True)(x)
        torch.testing.assert_close(plain.double(), exact, atol=1e-1, rtol=3e-2)


@pytest.mark.parametrize("isa", CPU_ISAS)
@pytest.mark.parametrize("part", [(0, 100), (32, 64), (96, 100), (5, 40), (7, 7)], ids=str)
def test_parts_of_a_gated_weight_are_multiplied_alone(isa: str, part: tuple[int, int]) -> None:
    if isa not in isas():
        pytest.skip(f"this build or processor has no {isa}")
    x, weight = randn(9, 96).bfloat16(), (randn(200, 96) / 8).bfloat16()
    for bias in (randn(200, seed=1).bfloat16(), None):
        for product in (packed(weight, bias, isa, gated=True), PlainProduct(weight, bias, gated=True)):
            whole, some = product(x), product.some(x, Span(*part))
            torch.testing.assert_close(some, whole[:, slice(*part)], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("isa", CPU_ISAS)
def test_a_part_may_leave_the_bias_to_another(isa: str) -> None:
    if isa not in isas():
        pytest.skip(f"this build or processor has no {isa}")
    x, weight, bias = randn(9, 96).bfloat16(), randn(40, 96).bfloat16(), randn(40, seed=1).bfloat16()
    for product in (packed(weight, bias, isa), PlainProduct(weight, bias)):
        parts = (Span(0, 64), Span(64, 96), Span(96, 96))
        summands = [
            product.over(x[:, p.start : p.stop], p, adds_bias=p.start == 0, wide=True) for p in parts
        ]
        torch.testing.assert_close(sum(summands), product.wide(x), atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("isa", CPU_ISAS)
def test_an_output_is_the_same_whatever_rows_share_the_call(isa: str) -> None:
    if isa not in isas():
        pytest.skip(f"this build or processor has no {isa}")
    x, product = randn(29, 576).bfloat16(), packed(randn(70, 576).bfloat16(), None, isa)
    alone = torch.cat([product.wide(row) for row in x.split(1)])
    assert torch.equal(product.wide(x), alone)


def test_rows_of_a_weight_are_those_that_were_kept_and_zeros_of_other_parts() -> None:
    for outputs, inputs in ((70, 16), (32, 9), (5, 1)):
        weight = randn(outputs, inputs).bfloat16()
        numbers = torch.tensor([outputs - 1, -1, 0, outputs // 2, outputs, 0] * 20)
        wanted = torch.cat([weight, torch.zeros(1, inputs)]).bfloat16()[numbers.clamp(max=outputs)]
        wanted[numbers < 0] = 0
        for product in (packed(weight, None, "avx2"), PlainProduct(weight, None)):
            assert torch.equal(product.rows(numbers + 9, first=9), wanted)


def test_packing_keeps_a_weight_once_and_leaves_other_dtypes_alone() -> None:
    shapes = {"in_features": 16, "out_features": 40, "bias": True}
    layers = [
        ColumnLinear(**shapes, storage=Storage(dtype, torch.device("cpu")))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    for layer in layers:
        layer.weight.normal_(), layer.bias.normal_()
    wanted = [layer(randn(3, 16).to(layer.weight.dtype)) for layer in layers]
    pack(layers)
    for layer, before in zip(layers, wanted, strict=True):
        torch.testing.assert_close(layer(randn(3, 16).to(before.dtype)), before, atol=2e-2, rtol=2e-2)
    if packing_isa() is not None:
        assert [name for name, _ in layers[0].named_parameters()] == ["bias"]
    assert [name for name, _ in layers[1].named_parameters()] == ["weight", "bias"]


def test_a_plain_weight_moves_among_packed_ones_and_stays_the_same() -> None:
    storage = Storage(torch.bfloat16, torch.device("cpu"))
    layers = [PlainMatrix(3, 7, storage=storage), ColumnLinear(16, 40, bias=False, storage=storage)]
    for layer in layers:
        layer.weight.normal_()
    x, plain = randn(3, 16).bfloat16(), layers[0].weight
    kept, wanted = plain.clone(), layers[1](x)
    pack(layers)
    assert torch.equal(layers[0].weight, kept)
    torch.testing.assert_close(layers[1](x), wanted, atol=2e-2, rtol=2e-2)
    if packing_isa() is not None:
        assert layers[0].weight.data_ptr() % LINE_BYTES == 0
        assert layers[0].weight.data_ptr() != plain.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(ops: NativeRowOps, size: int, dtype: torch.dtype) -> None:
    weight = randn(size, dtype=dtype, seed=1)
    for x in (
        randn(5, size, dtype=dtype),
        randn(3, 2, size, dtype=dtype),
        randn(4, 2 * size, dtype=dtype),
        randn(4, 5 * size, dtype=dtype)[:, size:].unflatten(1, (4, size))[:, ::2],
    ):
        part = x[..., :size]
        assert_last_bit(ops.rms_norm(part, weight, 1e-5), TorchRowOps().rms_norm(part, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_leaves_the_sum(ops: NativeRowOps, size: int, dtype: torch.dtype) -> None:
    weight, more = randn(size, dtype=dtype, seed=1), randn(4, size, dtype=dtype, seed=2)
    x = randn(4, 2 * size, dtype=dtype)[:, :size]
    wanted, theirs = x + more, x.clone()
    assert_last_bit(
        ops.add_rms_norm(x, more, weight, 1e-5), TorchRowOps().add_rms_norm(theirs, more, weight, 1e-5)
    )
    assert torch.equal(x, wanted)
    assert torch.equal(theirs, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: NativeRowOps, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(7, 2 * size, dtype=dtype) * 20  # where a naive exp overflows in fp16
    assert_last_bit(ops.silu_mul(gate_up), TorchRowOps().silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 64, 80])
@pytest.mark.parametrize("plain", [0, 24])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate(ops: NativeRowOps, dim: int, dtype: torch.dtype, plain: int, interleaved: bool) -> None:
    angles = randn(6, 1, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    wide = randn(6, 5, plain + dim, dtype=dtype)
    for x in (wide, wide[:, 1:3], wide.transpose(0, 1).contiguous().transpose(0, 1)):
        wanted = TorchRowOps().rotate(x, cos, sin, interleaved=interleaved)
        got = ops.rotate(x, cos, sin, interleaved=interleaved)
        assert_last_bit(got, wanted)
        assert torch.equal(got[..., :plain], x[..., :plain])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 21])
@pytest.mark.parametrize(("height", "width"), [(12, 24), (128, 512), (3, 300), (9, 1100), (37, 5)])
def test_products_by_head_equal_float64(
    ops: NativeRowOps, rows: int, height: int, width: int, dtype: torch.dtype
) -> None:
    up = randn(3, height + 5, width + 2, dtype=dtype, seed=1)[:, :height, :width]
    x = randn(rows, 3, height + 7, dtype=dtype)[..., :height]
    y = randn(rows, 3, width + 7, dtype=dtype)[..., 7:]
    sums, dots = ops.head_sums(x, up), ops.head_dots(y, up)
    near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 2e-4}
    for got, wanted in (
        (sums, torch.einsum("rhn,hnm->rhm", x.double(), up.double())),
        (dots, torch.einsum("rhm,hnm->rhn", y.double(), up.double())),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, **near)
    if 0 < rows <= MOST_HEAD_ROWS:
        assert torch.equal(sums, torch.cat([ops.head_sums(row, up) for row in x.split(1)]))
        assert torch.equal(dots, torch.cat([ops.head_dots(row, up) for row in y.split(1)]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_side_by_side_takes_parts_of_any_stride_and_width(ops: NativeRowOps, dtype: torch.dtype) -> None:
    wide = randn(300, 40, dtype=dtype)
    parts = [wide[:, 3:7], wide[:, :0], wide.t()[:300, :5].repeat(8, 1)[:300], wide]
    assert torch.equal(ops.side_by_side(parts), TorchRowOps().side_by_side(parts))
    heads = wide.view(60, 5, 40)
    parts = [heads[..., 4:9], heads.flip(0)[..., :2]]
    assert torch.equal(ops.side_by_side(parts), TorchRowOps().side_by_side(parts))


def test_not_a_number_stays_one(ops: NativeRowOps) -> None:
    for dtype in DTYPES:
        x = torch.full((1, 16), torch.nan, dtype=dtype)
        assert ops.rms_norm(x, torch.ones(16, dtype=dtype), 1e-5).isnan().all()
        assert ops.silu_mul(x).isnan().all()


def test_rows_over_threads_are_all_done(ops: NativeRowOps) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    x, weight = randn(1000, 576), randn(576, seed=1)
    got = ops.rms_norm(x, weight, 1e-5)
    torch.set_num_threads(before)
    assert_last_bit(got, TorchRowOps().rms_norm(x, weight, 1e-5))
