"""Walls that import-linter cannot see: what is loaded, and what modules hold."""

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import kvspan
from kvspan.comm.dist import DistGroup
from kvspan.comm.local import LocalGroup, SoloGroup

DECIDING = [
    "kvspan",
    "kvspan.topology",
    "kvspan.layout",
    "kvspan.config.engine",
    "kvspan.config.model",
    "kvspan.request",
    "kvspan.step",
    "kvspan.cost.choose",
    "kvspan.cost.memory",
    "kvspan.cache.manager",
    "kvspan.scheduler",
    "kvspan.trace.mooncake",
    "kvspan.trace.synth",
    "kvspan.trace.tokens",
    "kvspan.engine.core",
    "kvspan.plan.search",
    "kvspan.plan.simulate",
    "kvspan.cli.main",
]


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_does_not_load_torch(name: str) -> None:
    """In a fresh interpreter, since a parent package runs before its child."""
    code = f"import {name}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(kvspan.__path__, "kvspan."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_no_module_holds_a_group_or_a_tensor() -> None:
    kinds = (torch.Tensor, DistGroup, LocalGroup, SoloGroup)
    held = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds)
    ]
    assert not held


def test_every_public_name_is_there() -> None:
    for name in kvspan.__all__:
        assert getattr(kvspan, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvspan.nonsense
