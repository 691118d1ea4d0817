"""Drawing from logits that ranks share out: as a twin draws that takes one token at a time."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sampling.twin import twin
from torch import Tensor

from kvspan.comm.group import World
from kvspan.layers.logits import Logits
from kvspan.native import NativePath
from kvspan.request import SamplingParams
from kvspan.sampling import weights as module
from kvspan.sampling.draw import draw
from kvspan.sampling.weights import OCTAVES, draw_weights
from kvspan.testing.ranks import run_ranks
from kvspan.topology import cuts

SHARES = (0.0, 0.2, 0.4999, 0.5, 0.83, 1 - 2.0**-53)


@pytest.fixture(params=["native", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the extension and without."""
    if request.param == "torch":
        monkeypatch.setattr(module, "native_path", lambda: NativePath(None, "for the test"))
    return str(request.param)


def drawn(
    logits: Tensor, params: Sequence[SamplingParams], shares: Sequence[float], *, num_ranks: int
) -> list[int]:
    """What every rank draws, which is the same."""
    parts = cuts(logits.shape[1], parts=num_ranks)

    def of_rank(world: World) -> list[int]:
        part = parts[world.rank]
        group = world.group([range(num_ranks)])
        shared = Logits(logits[:, part.start : part.stop], group, parts)
        return draw(shared, shared.best().values, params, shares).tolist()

    first, *others = run_ranks(num_ranks, of_rank)
    assert all(other == first for other in others)
    return first


WISHES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 2, 5, 11, 100]),
    top_p=st.sampled_from([1.0, 0.93, 0.51, 0.017]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
)
LOGIT = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, -math.inf]), st.floats(-20, 20, width=32))
ROWS = st.lists(
    st.tuples(
        st.lists(LOGIT, min_size=11, max_size=11).filter(lambda xs: max(xs) > -math.inf),
        WISHES,
        st.sampled_from(SHARES),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.timeout(300)
@settings(max_examples=60, deadline=None)
@given(rows=ROWS, num_ranks=st.sampled_from([1, 2, 3, 5, 13]))
def test_ranks_draw_together_what_the_twin_draws(
    rows: list[tuple[list[float], SamplingParams, float]], num_ranks: int
) -> None:
    logits, params, shares = zip(*rows, strict=True)
    wanted = [twin(*each) for each in rows]
    assert drawn(torch.tensor(logits), params, shares, num_ranks=num_ranks) == wanted


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_wide_vocabulary(either: str, num_ranks: int) -> None:
    logits = 2 * torch.randn(5, 3_000, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(top_p=0.97),
        SamplingParams(top_k=1_100),
        SamplingParams(top_k=2_995, top_p=0.99),
        SamplingParams(top_k=3),
        SamplingParams(min_p=1e-3),
    ]
    for share in SHARES:
        wanted = [twin(x, p, share) for x, p in zip(logits.tolist(), params, strict=True)]
        assert drawn(logits, params, [share] * 5, num_ranks=num_ranks) == wanted, either


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(top_k=4), 4),
        (SamplingParams(top_k=4, top_p=0.5), 2),
        (SamplingParams(top_p=0.5), 4),
        (SamplingParams(top_p=1e-300), 1),
    ],
    ids=str,
)
def test_of_equal_tokens_those_with_low_ids_stay(params: SamplingParams, left: int) -> None:
    shares = [(i + 0.5) / 8 for i in range(8)]
    tokens = drawn(torch.zeros(8, 8), [params] * 8, shares, num_ranks=2)
    assert tokens == [int(share * left) for share in shares]


# ---- weights


@settings(deadline=None)
@given(
    row=st.lists(LOGIT, max_size=9),
    size=st.integers(0, 1_100),
    temperature=st.sampled_from([1e-9, 0.3, 1.0, 40.0]),
    least=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_native_weights_equal_torchs(
    row: list[float], size: int, temperature: float, least: float
) -> None:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(size))
    logits = torch.stack([torch.cat([noise, torch.tensor(row)]), torch.cat([torch.tensor(row), noise])])
    most = float(logits.amax()) if logits.numel() and logits.amax() > -math.inf else 0.0
    columns = torch.tensor([[most, temperature, least]] * 2, dtype=torch.float64).T.contiguous()
    rows = dict(zip(("greatest", "temperature", "least"), columns, strict=True))
    native = draw_weights(logits, **rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "native_path", lambda: NativePath(None, "for the test"))
        plain = draw_weights(logits, **rows)
    close = {"rtol": 1e-13, "atol": 1e-300}
    torch.testing.assert_close(native.totals(), plain.totals(), **close)
    (sums, counts), (plain_sums, plain_counts) = native.octaves(), plain.octaves()
    torch.testing.assert_close(sums.sum(-1), plain_sums.sum(-1), **close)
    assert torch.equal(counts.sum(-1), plain_counts.sum(-1))
    for last in (0, 1, OCTAVES - 1):
        lasts = torch.tensor([last, last])
        sizes = counts.cumsum(-1)[:, last]
        places, weights = native.collect(lasts, sizes)
        plain_places, plain_weights = plain.collect(lasts, sizes)
        assert torch.equal(places, plain_places)
        torch.testing.assert_close(weights, plain_weights, **close)
    for share in (0.1, 0.77):
        goals = torch.tensor([share * float(native.totals()[0]), -1.0], dtype=torch.float64)
        assert native.pick(goals).tolist() == plain.pick(goals).tolist()


def test_the_first_token_whose_sum_is_more(either: str) -> None:
    logits = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.5, 0.0]).log().expand(6, -1)
    ones = torch.ones(6, dtype=torch.float64)
    weights = draw_weights(logits, greatest=0 * ones, temperature=ones, least=0 * ones)
    whole = float(weights.totals()[0])
    goals = [0.0, 0.2499 * whole, 0.2501 * whole, 0.7499 * whole, 0.7501 * whole, 5.0]
    found = weights.pick(torch.tensor(goals, dtype=torch.float64))
    assert found.tolist() == [1, 1, 3, 3, 4, 4], either
