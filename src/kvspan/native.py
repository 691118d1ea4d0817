"""The native extension: whether it is there, and which kernels of it run. Knows no tensors."""

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from kvspan.config.environment import CPU_ISA, CPU_ISAS, asked_cpu_isa
from kvspan.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativePath:
    """Which native kernels run in this process.

    Args:
        isa: their instruction set; None = there are none.
        why: the reason, as a sentence's end.
    """

    isa: str | None
    why: str


@cache
def native_path() -> NativePath:
    """The instruction set that the environment forces, or else the best one of build and processor.

    Raises:
        ConfigError: the one that is forced is not to be had here.
    """
    asked = asked_cpu_isa()
    try:
        native = extension()
    except ImportError as error:
        _LOG.warning("The native kernels cannot be imported, so torch's serve: %s", error)
        return NativePath(None, f"the native extension cannot be imported ({error})")
    has = [isa for isa in CPU_ISAS if native.available(native.Isa[isa])]
    if asked is None:
        return NativePath(has[-1], f"the best of {', '.join(has)}")
    if asked not in has:
        raise ConfigError(f"{CPU_ISA}={asked}: this build and processor have {', '.join(has)}.")
    return NativePath(asked, f"{CPU_ISA} asks for it")


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Asks for huge pages under memory that has not been touched; long reads of it are then faster.

    It is a wish: without the extension, or where there are no such pages, nothing happens.

    Args:
        address: of its first byte.
        num_bytes: its size.
    """
    if native_path().isa is not None:
        extension().prefer_huge_pages(address, num_bytes)


def extension() -> ModuleType:
    """The extension, imported when it is first asked for.

    Raises:
        ImportError: it was not built, or not for this machine.
    """
    return importlib.import_module("kvspan._native")
