"""Native linear layers and row operators against torch, on every instruction set there is."""

import pytest
import torch

from kvspan.config.environment import CPU_ISAS
from kvspan.layers.matmul import MOST_ROWS, NativeLinear, linear, wide_linear
from kvspan.layers.rows import NativeRowOps, TorchRowOps
from kvspan.native import NativePath
from kvspan.testing.cases import DTYPES

SIZES = [8, 40, 576, 1000]


def isas(*, with_linear: bool) -> list[str]:
    native = pytest.importorskip("kvspan._native")
    there = [isa for isa in CPU_ISAS if native.available(native.Isa[isa])]
    return [isa for isa in there if not with_linear or native.has_linear(native.Isa[isa])]


@pytest.fixture(params=CPU_ISAS)
def ops(request: pytest.FixtureRequest) -> NativeRowOps:
    if request.param not in isas(with_linear=False):
        pytest.skip(f"this build or processor has no {request.param}")
    return NativeRowOps(request.param)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_last_bit(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within a rounding or two of the dtype."""
    assert got.dtype == wanted.dtype
    near = 4 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, MOST_ROWS])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 1), (40, 17), (576, 100), (1000, 15), (0, 5)])
def test_linear_equals_float64(rows: int, inputs: int, outputs: int) -> None:
    x, weight = randn(rows, inputs + 3).bfloat16()[:, :inputs], randn(outputs, inputs).bfloat16()
    bias = randn(outputs, seed=1).bfloat16()
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(wide_linear(x, weight).double(), exact, atol=2e-1, rtol=1e-2)
    for isa in isas(with_linear=True):
        native = NativeLinear(NativePath(isa, ""))
        wide = native(x, weight, None, torch.float32)
        torch.testing.assert_close(wide.double(), exact, atol=1e-4, rtol=1e-5)
        wanted = (exact + bias.double()).bfloat16()
        torch.testing.assert_close(native(x, weight, bias, torch.bfloat16), wanted, atol=1e-3, rtol=1e-2)


def test_what_the_native_linear_does_not_take_goes_to_torch() -> None:
    for x in (randn(MOST_ROWS + 1, 16).bfloat16(), randn(2, 16), randn(16, 2).bfloat16().T):
        weight = randn(5, 16).to(x.dtype)
        torch.testing.assert_close(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(ops: NativeRowOps, size: int, dtype: torch.dtype) -> None:
    weight = randn(size, dtype=dtype, seed=1)
    for x in (
        randn(5, size, dtype=dtype),
        randn(3, 2, size, dtype=dtype),
        randn(4, 2 * size, dtype=dtype),
    ):
        part = x[..., :size]
        assert_last_bit(ops.rms_norm(part, weight, 1e-5), TorchRowOps().rms_norm(part, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: NativeRowOps, size: int, dtype: torch.dtype) -> None:
    gate_up = randn(7, 2 * size, dtype=dtype) * 20  # where a naive exp overflows in fp16
    assert_last_bit(ops.silu_mul(gate_up), TorchRowOps().silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_rotate(ops: NativeRowOps, dim: int, dtype: torch.dtype) -> None:
    angles = randn(6, 1, dim // 2)
    wide = randn(6, 5, dim, dtype=dtype)
    for x in (wide, wide[:, 1:3], wide.transpose(0, 1).contiguous().transpose(0, 1)):
        wanted = TorchRowOps().rotate(x, angles.cos(), angles.sin())
        assert_last_bit(ops.rotate(x, angles.cos(), angles.sin()), wanted)


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
