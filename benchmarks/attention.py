"""Speed of the attention kernels on this CPU, beside the bandwidth and the rivals measured with it.

    OMP_NUM_THREADS=2 python benchmarks/attention.py decode --threads 1
    OMP_NUM_THREADS=2 python benchmarks/attention.py prefill --threads 2

Caches of 8 bits are given in GB/s of the bf16 that they stand for. Rounds of all contenders are
interleaved, and the median and the best of each are printed as JSON lines.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvspan.attention.backends.registry import KERNELS, load_kernel
from kvspan.attention.contract import Cached, Kernel, KeyIndex, Need
from kvspan.attention.scaled import LIMITS, Scaled
from kvspan.native import prefer_huge_pages


@dataclass(frozen=True)
class Shape:
    """One measurement.

    Args:
        name: what it stands for.
        heads: query heads, KV heads.
        dims: of keys, of values; values narrower than keys are a view into them (MLA).
        batch: sequences.
        context: keys of each.
        rows: query rows of each; the last row sees all keys, the one before one less.
    """

    name: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    context: int
    rows: int = 1

    @property
    def kv_bytes(self) -> int:
        """Bytes that a decode reads, whatever shares them."""
        width = self.dims[0] if self.dims[0] != self.dims[1] else 2 * self.dims[0]
        return self.batch * self.context * self.heads[1] * width * 2

    @property
    def flops(self) -> float:
        """Multiplications and additions, of visible keys alone."""
        visible = self.rows * (self.context - (self.rows - 1) / 2)
        return 2.0 * self.batch * self.heads[0] * sum(self.dims) * visible


SHAPES = {
    "decode": (
        Shape("smollm2", (9, 3), (64, 64), 32, 4096),
        Shape("smollm2-short", (9, 3), (64, 64), 8, 512),
        Shape("llama-8b", (32, 8), (128, 128), 4, 8000),
        Shape("mha", (8, 8), (64, 64), 8, 4096),
        Shape("mla-16", (16, 1), (576, 512), 4, 32000),
        Shape("mla-128", (128, 1), (576, 512), 1, 16000),
    ),
    "prefill": (
        Shape("smollm2", (9, 3), (64, 64), 1, 4096, 4096),
        Shape("llama-8b", (32, 8), (128, 128), 1, 2048, 2048),
        Shape("llama-8b-chunk", (32, 8), (128, 128), 1, 8192, 512),
    ),
}
BLOCK_SIZE = 16


def inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KeyIndex, float]:
    """Random keys in blocks that lie in a random order."""
    per_sequence = -(-shape.context // BLOCK_SIZE)
    heads, kv_heads = shape.heads
    blocks = torch.randn(shape.batch * per_sequence, kv_heads, BLOCK_SIZE, shape.dims[0]).bfloat16()
    shared = shape.dims[0] != shape.dims[1]
    values = blocks[..., : shape.dims[1]] if shared else torch.randn(blocks.shape).bfloat16()
    order = torch.randperm(len(blocks))
    last = shape.context - np.arange(shape.rows)[::-1]
    index = KeyIndex(
        row_starts=tuple(range(0, shape.batch * shape.rows + 1, shape.rows)),
        tables=tuple(order.view(shape.batch, per_sequence)),
        first=np.zeros(shape.batch * shape.rows, np.int64),
        last=np.tile(last, shape.batch),
    )
    query = torch.randn(shape.batch * shape.rows, heads, shape.dims[0]).bfloat16()
    blocks = settled(blocks)
    values = blocks[..., : shape.dims[1]] if shared else settled(values)
    return query, blocks, values, index, shape.dims[0] ** -0.5


def settled(x: torch.Tensor) -> torch.Tensor:
    """The same in memory that a cache would have."""
    room = torch.empty(x.shape, dtype=x.dtype)
    prefer_huge_pages(room.data_ptr(), room.nbytes)
    return room.copy_(x)


def coded(
    shape: Shape, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> tuple[Cached, Cached]:
    """Keys and values in codes of 8 bits."""
    parts = (shape.dims[1], shape.dims[0] - shape.dims[1])
    if not parts[1]:
        return tuple(Scaled.of(x, parts[:1], codes=dtype) for x in (keys, values))
    latents = Scaled.of(keys, parts, codes=dtype)
    return latents, latents.first_part


def kernels(shape: Shape) -> dict[str, Kernel]:
    """Every fast kernel that takes the shape."""
    need = Need(device="cpu", dtype=torch.bfloat16, head_dim=shape.dims[0], value_dim=shape.dims[1])
    found = {name.rpartition(":")[2]: load_kernel(name) for name in KERNELS if "reference" not in name}
    return {name: k for name, k in found.items() if k.capabilities.refuse(need) is None}


def interleaved(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, the contenders taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return {name: measured[1:] for name, measured in seconds.items()}  # the first call warms up


def measured(shape: Shape, memory: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kernel's rounds, and of reading `memory` from end to end between them."""
    query, keys, values, index, scale = inputs(shape)
    contenders: dict[str, Callable[[], object]] = {
        name: partial(kernel, query, keys, values, index, scale)
        for name, kernel in kernels(shape).items()
    }
    if "NativeKernel" in contenders:
        kernel = kernels(shape)["NativeKernel"]
        for dtype in LIMITS:
            cached = coded(shape, keys, values, dtype)
            contenders[f"NativeKernel {dtype}"] = partial(kernel, query, *cached, index, scale)
    contenders["read"] = memory.max
    return interleaved(contenders, rounds)


def report(shape: Shape, what: str, seconds: list[float], read_bytes: int) -> dict[str, object]:
    """One line of figures."""
    line: dict[str, object] = {"shape": shape.name, "what": what, "threads": torch.get_num_threads()}
    for key, taken in (("median", statistics.median(seconds)), ("best", min(seconds))):
        line[f"{key}_ms"] = round(taken * 1e3, 3)
        line[f"{key}_gb_s"] = round(read_bytes / taken / 1e9, 1)
        if what != "read":
            line[f"{key}_gflop_s"] = round(shape.flops / taken / 1e9)
    return line


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a shape's name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    memory = settled(torch.ones(1 << 26, dtype=torch.int32))  # 256 MiB, past every cache
    for shape in SHAPES[arguments.what]:
        if arguments.only not in shape.name:
            continue
        for what, seconds in measured(shape, memory, arguments.rounds).items():
            read_bytes = memory.nbytes if what == "read" else shape.kv_bytes
            print(json.dumps(report(shape, what, seconds, read_bytes)), flush=True)


if __name__ == "__main__":
    main()
