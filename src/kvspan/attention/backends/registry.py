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


def choose_kernel(need: Need) -> Kernel:
    """The fastest kernel that can serve `need`.

    Raises:
        ConfigError: none can; the sentence says why each one refused.
    """
    refusals = []
    for name in KERNELS:
        kernel = load_kernel(name)
        reason = kernel.capabilities.refuse(need)
        if reason is None:
            return kernel
        refusals.append(f"{name.rpartition(':')[2]}: {reason}")
    raise ConfigError(f"No attention kernel serves this model. {'; '.join(refusals)}.")
