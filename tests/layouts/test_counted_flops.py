"""Products that ranks make for a prompt are those that the cost model counts."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from kvspan.config.model import parse_model_config
from kvspan.cost.deployment import Deployment
from kvspan.cost.facts import Device, find_device, load_devices
from kvspan.cost.homes import HomesCost
from kvspan.cost.steptime import StepCost
from kvspan.cost.weights import WeightDtypes
from kvspan.cost.work import StepWork
from kvspan.layers.matmul import PlainProduct
from kvspan.loading.resolve import resolve
from kvspan.models.deepseek import LatentAttention
from kvspan.models.dense import DenseAttention
from kvspan.testing.checkpoints import write_checkpoint
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import TINY, RawConfig, tiny_deepseek_v2, tiny_deepseek_v3
from kvspan.topology import Span, Topology
from tests.conftest import SEED

MODELS: dict[str, RawConfig] = {
    "llama-biases": TINY["llama-biases"],
    "deepseek-v2-dense": tiny_deepseek_v2(heads=8, first_k_dense_replace=3),
    "deepseek-v3-dense": tiny_deepseek_v3(heads=8, first_k_dense_replace=3),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Operations of each product with a weight in attention layers, on all ranks together."""
    made: list[int] = []
    inside = threading.local()

    def attention(layer: type[nn.Module]) -> None:
        inner = layer.forward

        def outer(*args: object) -> object:
            inside.it = True
            out = inner(*args)
            inside.it = False
            return out

        monkeypatch.setattr(layer, "forward", outer)

    def counting(name: str, size: Callable[[PlainProduct, Tensor, Sequence[Span]], int]) -> None:
        inner = getattr(PlainProduct, name)

        def outer(product: PlainProduct, x: Tensor, *spans: Span, **how: bool) -> Tensor:
            if getattr(inside, "it", False):
                made.append(2 * len(x) * size(product, x, spans))
            result: Tensor = inner(product, x, *spans, **how)
            return result

        monkeypatch.setattr(PlainProduct, name, outer)

    attention(DenseAttention)
    attention(LatentAttention)
    counting("__call__", lambda product, *_: product._weight.numel())
    counting("some", lambda product, _, spans: spans[0].size * product._weight.shape[1])
    counting("over", lambda product, _, spans: spans[0].size * product._weight.shape[0])
    return made


def counting_device() -> Device:
    """On which an operation takes a picosecond, and nothing else any time: seconds are operations."""
    device = find_device("GB300", load_devices())
    rates = msgspec.structs.replace(
        device.rates[0],
        num_ranks=1,
        weights_gbs=1e30,
        gemm_tflops={"bf16": 1.0},
        kernel_us=0.0,
    )
    return msgspec.structs.replace(device, rates=(rates,))


@pytest.mark.parametrize(
    ("replicate_q", "homes"),
    [(False, False), (True, False), (True, True)],
    ids=["gather", "replicate", "homes"],
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_what_prompts_multiply(
    name: str, size: int, homes: bool, replicate_q: bool, counted: list[int], tmp_path: Path
) -> None:
    """Fresh prompts, and chunks of which some are gathered and others ask what is cached."""
    write_checkpoint(tmp_path, MODELS[name], seed=SEED)
    checkpoint = resolve(str(tmp_path))
    model = parse_model_config(checkpoint.raw_config, where=checkpoint.where)
    topology = Topology(tp_size=size, dcp_size=size)
    lengths, chunk = (64, 40, 19), 10_000 if homes else 24
    sequences = [torch.arange(n).tolist() for n in lengths]
    case = ForwardCase(topology=topology, replicate_q=replicate_q, ranks_are_homes=homes, chunk=chunk)
    forward(checkpoint, sequences, case)
    on = Deployment(
        model=model,
        device=counting_device(),
        topology=topology,
        dtypes=WeightDtypes(),
        kv_dtype_bytes=4,
        replicate_q=replicate_q,
    )
    cost = HomesCost(on).spread if homes else StepCost(on)
    wanted = 0.0
    for start in range(0, max(lengths), chunk):
        chunks = [(start, min(chunk, n - start)) for n in lengths if n > start]
        rows = sum(n for _, n in chunks)
        work = StepWork.of(chunks, num_sampled=rows, ways=cost.ways)
        wanted += 1e12 * model.num_layers * cost._projections_s(work, rows)
    assert sum(counted) == pytest.approx(size * wanted, rel=1e-9)
