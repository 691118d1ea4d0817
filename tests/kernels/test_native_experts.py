"""The experts' native operator against float64, on every instruction set there is."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from kvspan.comm.local import LocalWorld, solo
from kvspan.config.environment import CPU_ISAS
from kvspan.config.moe import MoeConfig
from kvspan.layers.experts import MOST_NATIVE_ROWS, Experts, Shared
from kvspan.layers.linear import Storage
from kvspan.layers.matmul import Arena, packing_isa
from kvspan.layers.routing import Routing
from kvspan.layers.team import Team
from kvspan.testing.ranks import run_ranks
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Span

pytestmark = pytest.mark.skipif(packing_isa() is None, reason="weights are not packed here")

NUM_EXPERTS, PER_ROW = 8, 3
ALONE = Team(solo())


@dataclass(frozen=True)
class Case:
    """Sizes, and which experts are kept."""

    rows: int
    hidden: int = 40
    inner: int = 28
    kept: tuple[int, int] = (0, NUM_EXPERTS)
    shared: bool = True
    gated: bool = False

    def __str__(self) -> str:
        added = "-gated" if self.gated else "-shared" if self.shared else ""
        first, stop = self.kept
        return f"rows{self.rows}-{self.hidden}x{self.inner}-experts[{first},{stop}]{added}"


CASES = [
    Case(0),
    Case(1),
    Case(2, gated=True),
    Case(5, hidden=65, inner=1, shared=False),
    Case(13, hidden=360, inner=100, kept=(2, 5), gated=True),
    Case(40, hidden=96, inner=33, kept=(7, 8)),
    Case(MOST_NATIVE_ROWS, hidden=33, inner=200, shared=False),
]


def isas() -> list[str]:
    native = pytest.importorskip("kvspan._native")
    return [isa for isa in CPU_ISAS if native.available(native.Isa[isa])]


@pytest.fixture(params=CPU_ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in isas():
        pytest.skip(f"this build or processor has no {request.param}")
    return str(request.param)


def experts(case: Case, dtype: torch.dtype) -> Experts:
    sizes = {"num_experts": NUM_EXPERTS, "experts_per_token": PER_ROW}
    moe = MoeConfig(layers=(0,), **sizes, intermediate_size=case.inner)
    inner, storage = Span(0, case.inner), Storage(dtype, torch.device("cpu"))
    return Experts(moe, case.hidden, experts=Span(*case.kept), inner=inner, storage=storage)


def made(case: Case, seed: int = 0) -> tuple[Experts, torch.Tensor, Routing, Shared | None]:
    """Experts in bf16 that are not packed yet, and rows for them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    layer = experts(case, torch.bfloat16)
    layer.gate_up.copy_(drawn(*layer.gate_up.shape) / case.hidden**0.5)
    layer.down.copy_(drawn(*layer.down.shape) / case.inner**0.5)
    order = torch.rand(case.rows, NUM_EXPERTS, generator=generator).argsort(dim=1)
    routing = Routing(
        order[:, :PER_ROW].contiguous(), torch.rand(case.rows, PER_ROW, generator=generator)
    )
    gate = drawn(case.rows, 1) if case.gated else None
    shared = Shared(drawn(case.rows, case.hidden), gate) if case.shared or case.gated else None
    return layer, drawn(case.rows, case.hidden), routing, shared


def packed(layer: Experts, isa: str) -> Experts:
    layer.pack(Arena(layer.packed_bytes), isa=isa)
    return layer


def exact(layer: Experts, x: torch.Tensor, routing: Routing, shared: Shared | None) -> torch.Tensor:
    """[R, hidden] float64; what lies between two products is rounded, as it is stored."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    if shared is not None:
        share = 1.0 if shared.gate is None else shared.gate.double().sigmoid()
        out += shared.values.double() * share
    for row, place in torch.cartesian_prod(*map(torch.arange, routing.experts.shape)).tolist():
        expert = int(routing.experts[row, place]) - layer.experts.start
        if 0 <= expert < layer.experts.size:
            gate, up = (layer.gate_up[expert].double() @ x[row].double()).chunk(2)
            inner = (F.silu(gate) * up).to(x.dtype).double()
            out[row] += float(routing.weights[row, place]) * (layer.down[expert].double() @ inner)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_rows_equal_float64(isa: str, case: Case) -> None:
    layer, *rest = made(case)
    wanted = exact(layer, *rest)
    got = packed(layer, isa)(*rest, ALONE)
    assert got.dtype == torch.bfloat16
    assert_within(got, wanted, "experts", torch.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_equals_float64_in_float32(case: Case) -> None:
    narrow, x, routing, shared = made(case)
    layer = experts(case, torch.float32)
    layer.gate_up.copy_(narrow.gate_up), layer.down.copy_(narrow.down)
    if shared is not None:
        shared = Shared(shared.values.float(), None if shared.gate is None else shared.gate.float())
    rest = (x.float(), routing, shared)
    assert_within(layer(*rest, ALONE), exact(layer, *rest), "experts", torch.float32)


def test_what_a_row_gets_does_not_depend_on_the_others(isa: str) -> None:
    layer, x, routing, shared = made(Case(29, hidden=360, inner=100))
    packed(layer, isa)
    assert shared is not None
    together = layer(x, routing, shared, ALONE)
    for row in range(len(x)):
        one = slice(row, row + 1)
        its = Routing(routing.experts[one], routing.weights[one])
        assert torch.equal(layer(x[one], its, Shared(shared.values[one]), ALONE), together[one])


def test_many_rows_and_few_agree(isa: str) -> None:
    layer, x, routing, _ = made(Case(MOST_NATIVE_ROWS + 1, hidden=96, inner=33))
    packed(layer, isa)
    some = slice(0, MOST_NATIVE_ROWS)
    few = layer(x[some], Routing(routing.experts[some], routing.weights[some]), None, ALONE)
    assert_within(layer(x, routing, None, ALONE)[some], few.double(), "experts", torch.bfloat16)


@pytest.mark.parametrize("rows", [9, MOST_NATIVE_ROWS + 1])
def test_summands_of_a_team_add_up(isa: str, rows: int) -> None:
    """An inner dim of 100 is pieces of 32, 32 and 36: the last one ends inside a panel."""
    case = Case(rows, hidden=65, inner=100, kept=(1, 7))
    _, x, routing, _ = made(case)
    wanted = packed(made(case)[0], isa)(x, routing, None, ALONE)

    def summand(world: LocalWorld) -> torch.Tensor:
        team = Team(world.group([range(world.size)]), [len(x), 0, 0])
        return packed(made(case)[0], isa)(x, routing, None, team)

    got = sum(its.double() for its in run_ranks(3, summand))
    torch.testing.assert_close(got, wanted.double(), atol=2e-2, rtol=2e-2)


def test_experts_that_nobody_chose_are_not_read(isa: str) -> None:
    layer, x, routing, shared = made(Case(4))
    left = torch.tensor([e for e in range(NUM_EXPERTS) if e not in routing.experts])
    assert len(left)
    wanted = exact(layer, x, routing, shared)
    layer.gate_up[left], layer.down[left] = torch.nan, torch.nan
    assert_within(packed(layer, isa)(x, routing, shared, ALONE), wanted, "experts", torch.bfloat16)


def test_no_expert_is_read_for_rows_of_zeros(isa: str) -> None:
    """As idle rows are: it would give zeros."""
    layer, x, routing, shared = made(Case(3))
    routing.experts[:] = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 2]])
    x[1] = torch.tensor([0.0, -0.0] * 20)
    wanted = exact(layer, x, routing, shared)
    layer.gate_up[3:], layer.down[3:] = torch.nan, torch.nan
    assert_within(packed(layer, isa)(x, routing, shared, ALONE), wanted, "experts", torch.bfloat16)


def test_a_row_that_is_not_a_number_stays_alone(isa: str) -> None:
    layer, x, routing, shared = made(Case(6))
    packed(layer, isa)
    before = layer(x, routing, shared, ALONE)
    x[2, 5] = torch.nan
    after = layer(x, routing, shared, ALONE)
    assert after[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(after[others], before[others])
