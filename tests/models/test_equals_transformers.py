"""transformers is the oracle: the same weights, the same tokens, the same logits."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from kvspan.loading.resolve import resolve
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import TINY
from kvspan.testing.tolerance import assert_within
from kvspan.topology import Topology

SEQUENCES = [
    torch.randint(203, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 33, 150)
]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Tensor]]]:
    """For each tiny config a saved model with random weights, and its logits."""
    found = {}
    for name, raw in TINY.items():
        torch.manual_seed(7)
        architecture = getattr(transformers, raw["architectures"][0])
        model = architecture(architecture.config_class(**raw)).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" not in key:
                    parameter.normal_(std=0.05)  # logits of about unit size
                else:
                    parameter.uniform_(0.5, 1.5)
            for key, buffer in model.named_buffers():
                if "correction_bias" in key:
                    buffer.normal_(std=0.1)
            logits = [model(torch.tensor([tokens])).logits[0] for tokens in SEQUENCES]
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        found[name] = (directory, logits)
    return found


@pytest.mark.parametrize("chunk", [10_000, 16])
@pytest.mark.parametrize("layout", ["one-rank", "sharded"])
@pytest.mark.parametrize("name", TINY)
def test_logits(
    oracles: dict[str, tuple[Path, list[Tensor]]], name: str, layout: str, chunk: int
) -> None:
    directory, wanted = oracles[name]
    heads = TINY[name]["num_attention_heads"]
    topology = Topology() if layout == "one-rank" else Topology(tp_size=3, dcp_size=3)
    assert heads % topology.attention_tp_size == 0
    case = ForwardCase(topology=topology, chunk=chunk)
    got = forward(resolve(str(directory)), SEQUENCES, case).logits
    for mine, theirs in zip(got, wanted, strict=True):
        assert_within(mine, theirs, "logits", torch.float32)
