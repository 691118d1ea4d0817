"""Every kernel against the reference, and the reference against attention written out for one row."""

import math

import pytest
import torch

from kvspan.attention.backends.reference import ReferenceKernel
from kvspan.attention.backends.registry import KERNELS, choose_kernel, load_kernel
from kvspan.attention.contract import Capabilities, Need
from kvspan.testing.cases import AttentionCase, attention_cases
from kvspan.testing.tolerance import assert_within

CASES = list(attention_cases())
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", [k for k in KERNELS if "reference" not in k])
def test_kernel_equals_reference(name: str, case: AttentionCase, device: str) -> None:
    kernel = load_kernel(name)
    if reason := kernel.capabilities.refuse(case.need):
        pytest.skip(reason)
    out, lse = kernel(*case.inputs(device))
    wanted, wanted_lse = ReferenceKernel()(*case.inputs())
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    assert_within(out.cpu(), wanted, "attention", case.dtype)
    assert_within(lse.cpu(), wanted_lse, "lse", case.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", [k for k in KERNELS if "reference" not in k])
def test_no_kernel_loses_a_query_that_is_not_a_number(
    name: str, value: float, dtype: torch.dtype
) -> None:
    kernel = load_kernel(name)
    case = next(c for c in CASES if c.dtype == dtype and c.name == "mixed" and not c.latent)
    if reason := kernel.capabilities.refuse(case.need):
        pytest.skip(reason)
    query, *rest = case.inputs()
    index = rest[2]
    row = int((index.last - index.first).argmax())
    query[row, 0, 0] = value
    out, lse = kernel(query, *rest)
    wanted, _ = ReferenceKernel()(query, *rest)
    assert wanted.isnan().all(-1).nonzero().tolist() == [[row, 0]]
    assert torch.equal(out.isnan(), wanted.isnan())
    assert (lse == torch.finfo(torch.float32).max).nonzero().tolist() == [[row, 0]]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case.heads[0] == 128 else [])
        for case in CASES
        if case.dtype == torch.float32
    ],
    ids=str,
)
def test_reference_equals_attention_row_by_row(case: AttentionCase) -> None:
    query, keys, values, index, scale = case.inputs()
    out, lse = ReferenceKernel()(query, keys, values, index, scale)
    group = case.heads[0] // case.heads[1]
    for s, table in enumerate(index.tables):
        for row in range(index.row_starts[s], index.row_starts[s + 1]):
            seen = range(int(index.first[row]), int(index.last[row]))
            for head in range(case.heads[0]):
                scores, vectors = [], []
                for token in seen:
                    at = (table[token // case.block_size], head // group, token % case.block_size)
                    scores.append(float(query[row, head].double() @ keys[at].double()) * scale)
                    vectors.append(values[at].double())
                if not scores:
                    assert lse[row, head] == -math.inf
                    assert not out[row, head].any()
                    continue
                total = math.fsum(math.exp(score) for score in scores)
                mean = sum(v * (math.exp(x) / total) for x, v in zip(scores, vectors, strict=True))
                assert lse[row, head].item() == pytest.approx(math.log(total), abs=1e-5)
                torch.testing.assert_close(out[row, head].double(), mean, atol=1e-5, rtol=1e-5)


def test_the_first_kernel_that_can_is_chosen() -> None:
    plain = Need(device="cpu", dtype=torch.bfloat16, head_dim=64, value_dim=64)
    latent = Need(device="cpu", dtype=torch.bfloat16, head_dim=576, value_dim=512)
    gpu = Need(device="cuda", dtype=torch.bfloat16, head_dim=64, value_dim=64)
    exact = Need(device="cpu", dtype=torch.float64, head_dim=64, value_dim=64)
    assert type(choose_kernel(plain)).__name__ == "NativeKernel"
    assert type(choose_kernel(latent)).__name__ == "NativeKernel"
    assert type(choose_kernel(gpu)).__name__ == "FusedKernel"
    assert type(choose_kernel(exact)).__name__ == "ReferenceKernel"


def test_a_refusal_names_what_is_missing_and_what_is_there() -> None:
    can = Capabilities(devices=("cuda",), dtypes=(torch.float16,), equal_dims=True)
    need = Need(device="cuda", dtype=torch.float16, head_dim=192, value_dim=128)
    assert can.refuse(need) == "value dim 128 beside head dim 192 (wants them equal)"
    cpu = Need(device="cpu", dtype=torch.float16, head_dim=64, value_dim=64)
    assert can.refuse(cpu) == "device cpu (has cuda)"
