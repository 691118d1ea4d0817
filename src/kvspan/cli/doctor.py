"""`kvspan doctor`: what is found on this machine, and which kernels will serve and why."""

import argparse
from collections.abc import Iterator

import psutil
import torch
from rich.console import Console

import kvspan
from kvspan.attention.backends.registry import KERNELS, choose_kernel, load_kernel
from kvspan.attention.contract import Need
from kvspan.cli.json_flag import JsonOutput, add_json_flag
from kvspan.config.sizes import format_bytes
from kvspan.native import native_path

NEEDS = {
    "bfloat16": Need(device="cpu", dtype=torch.bfloat16, head_dim=128, value_dim=128),
    "float16": Need(device="cpu", dtype=torch.float16, head_dim=128, value_dim=128),
    "float32": Need(device="cpu", dtype=torch.float32, head_dim=128, value_dim=128),
    "bfloat16, latent": Need(device="cpu", dtype=torch.bfloat16, head_dim=576, value_dim=512),
}
"""Caches that models have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    json = JsonOutput(arguments)
    found = dict(_facts())
    json.write(found)
    console = Console(highlight=False, soft_wrap=True, quiet=json.is_alone)
    for name, fact in found.items():
        console.print(f"{name:<28}{fact}", markup=False)
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "kvspan", kvspan.__version__
    yield "torch", str(torch.__version__)
    yield "devices", "cpu, cuda" if torch.cuda.is_available() else "cpu"
    yield "cores", f"{psutil.cpu_count(logical=False) or psutil.cpu_count()}"
    yield "free memory", format_bytes(psutil.virtual_memory().available)
    path = native_path()
    yield "native kernels", f"{path.isa or 'none'}: {path.why}"
    for cache, need in NEEDS.items():
        yield f"attention, {cache}", _choice(need)


def _choice(need: Need) -> str:
    """The kernel that serves a need, and why the ones before it do not."""
    chosen = type(choose_kernel(need)).__name__
    passed_over = []
    for name in KERNELS:
        kernel = load_kernel(name)
        if type(kernel).__name__ == chosen:
            break
        passed_over.append(f"not {type(kernel).__name__}: {kernel.capabilities.refuse(need)}")
    return "; ".join([chosen, *passed_over])
