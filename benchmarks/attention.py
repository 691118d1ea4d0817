"""Speed of the attention kernels on this CPU, beside what it can do at most and the rivals.

What it can do is measured between the kernels: it reads memory from end to end, and multiplies in
registers alone ("spin"); every kernel's line gives its share of both.

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
from kvspan.native import extension, native_path, prefer_huge_pages


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
        Shape("long-llama", (16, 2), (64, 64), 4, 32000),
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
SPIN_ROUNDS = 1_000_000


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
    if native_path().isa is not None:
        contenders["spin"] = spin
    return interleaved(contenders, rounds)


def spin() -> float:
    """Operations on bf16 in registers alone, on one thread."""
    native = extension()
    return float(native.spin(native.Isa[native_path().isa], native.Dtype.bf16, SPIN_ROUNDS))


@dataclass(frozen=True)
class Rates:
    """What one contender did, in bytes and in operations a second.

    Args:
        gb_s: of KV, in bf16.
        gflop_s: of visible keys.
    """

    gb_s: float
    gflop_s: float


def report(shape: Shape, seconds: dict[str, list[float]], memory_bytes: int) -> list[dict[str, object]]:
    """A line of figures for each contender; shares are of the core's, or cores', most."""
    threads = torch.get_num_threads()
    middle = {what: statistics.median(taken) for what, taken in seconds.items()}
    spun = threads * spin() / middle.pop("spin") if "spin" in middle else 0.0
    most = Rates(gb_s=memory_bytes / middle.pop("read") / 1e9, gflop_s=spun / 1e9)
    lines: list[dict[str, object]] = [
        {"shape": shape.name, "what": "at most", "threads": threads, **rounded(most)}
    ]
    for what, taken in middle.items():
        did = Rates(gb_s=shape.kv_bytes / taken / 1e9, gflop_s=shape.flops / taken / 1e9)
        line = {"shape": shape.name, "what": what, "threads": threads, **rounded(did)}
        line["median_ms"], line["best_ms"] = (round(s * 1e3, 3) for s in (taken, min(seconds[what])))
        line["of_read"] = round(did.gb_s / most.gb_s, 2)
        if most.gflop_s:
            line["of_spin"] = round(did.gflop_s / most.gflop_s, 2)
        lines.append(line)
    return lines


def rounded(rates: Rates) -> dict[str, object]:
    """For printing."""
    return {"gb_s": round(rates.gb_s, 1), "gflop_s": round(rates.gflop_s)}


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
        for line in report(shape, measured(shape, memory, arguments.rounds), memory.nbytes):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
