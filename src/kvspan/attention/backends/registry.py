"""Which kernel serves a model: the first, in order of preference, that does not refuse."""

import importlib

from kvspan.attention.contract import Kernel, Need
from kvspan.errors import ConfigError

KERNELS = (
    "kvspan.attention.backends.cpu:NativeKernel",
    "kvspan.attention.backends.fused:FusedKernel",
    "kvspan.attention.backends.reference:ReferenceKernel",
)
"""Dotted names, fastest first; a module is imported only when its turn comes."""


def load_kernel(name: str) -> Kernel:
    """The kernel of a dotted name `module:class`."""
    module, _, attribute = name.partition(":")
    kernel: Kernel = vars(importlib.import_module(module))[attribute]()
    return kernel


def choose_kernel(*needs: Need) -> Kernel:
    """The fastest kernel that can serve all of `needs`.

    Raises:
        ConfigError: none can; the sentence says why each one refused.
    """
    refusals = []
    for name in KERNELS:
        kernel = load_kernel(name)
        reasons = [r for need in needs if (r := kernel.capabilities.refuse(need)) is not None]
        if not reasons:
            return kernel
        refusals.append(f"{name.rpartition(':')[2]}: {reasons[0]}")
    raise ConfigError(f"No attention kernel serves this model. {'; '.join(refusals)}.")
