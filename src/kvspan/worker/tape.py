"""Work that is kept while it is done, to be done again by one native call, as a GPU's graphs are.

    recorded    Python runs as always; its native calls go on a tape, what they write lies in memory that
                stays, and views are free. Any other operator of torch is done, but not kept: the tape is
                then worth nothing, and says why
    played      the tape makes the same calls, with what has been put into its inputs since

Knows native calls and torch's operators. Knows no models and no steps.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvspan.native import extension

_aten = torch.ops.aten
_NEW = (_aten.empty.memory_format, _aten.new_empty.default)
_COPIES_PYTHON = _aten.lift_fresh.default
"""Makes a tensor of Python's numbers, which may be of the step; its schema is that of a view."""
_LINE_BYTES = 64

T = TypeVar("T")


class Scratch:
    """Memory of tensors that live for a while, over and over: handed out again when a tensor is gone.

    What is played after one another may share it. It comes in powers of two, so that tapes of all sizes
    share it too, and together take about twice what the largest takes; pages that nobody touches cost
    nothing.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._memory: dict[int, NDArray[np.uint8]] = {}  # all of it, by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with undefined content, on the CPU."""
        num_elements = int(np.prod(shape, dtype=np.int64))
        num_bytes = 1 << (max(num_elements * dtype.itemsize, _LINE_BYTES) - 1).bit_length()
        free = self._free[num_bytes]
        memory = free.pop() if free else _aligned(num_bytes)
        self._memory[memory.ctypes.data] = memory
        lent = memory[:]  # goes with the last tensor over it
        weakref.finalize(lent, free.append, memory)
        return torch.from_numpy(lent).view(dtype)[:num_elements].view(tuple(shape))

    def shared(self, tensor: Tensor) -> Tensor:
        """A tensor that was handed out, without a claim to its memory: others may write over it.

        What is played last can be read there, until something else is played or recorded. A tensor of
        other memory is left as it is.
        """
        memory = self._memory.get(tensor.data_ptr())
        if memory is None:
            return tensor
        return torch.from_numpy(memory).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that begins with a cache line."""
    memory = np.empty(num_bytes + _LINE_BYTES, np.uint8)
    return memory[-memory.ctypes.data % _LINE_BYTES :][:num_bytes]


class Tape:
    """What was recorded.

    Args:
        inputs: tensors of what a step brings; who plays it again fills them anew.
        scratch: where the results of the recorded work lie.
    """

    def __init__(self, inputs: Sequence[Tensor], scratch: Scratch) -> None:
        self._inputs = inputs  # keeps alive what the tape reads
        self._scratch = scratch
        self._native = extension().Tape([(x.data_ptr(), x.nbytes) for x in inputs])
        self._refused: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why playing it would not do what was recorded; None = it would."""
        if self._refused is None and not self._native.is_whole():
            return "a native call reads what a step brings where the next step does not bring it"
        return self._refused

    def num_calls(self) -> int:
        """Native calls that it has kept so far."""
        return int(self._native.num_calls())

    def record(self, work: Callable[[], T]) -> T:
        """Does some work, and keeps its native calls.

        Args:
            work: makes tensors of the inputs; what is not native and no view spoils the tape.

        Returns:
            What the work gives; playing the tape writes over it.
        """
        with _Recording(self._scratch) as recording:
            self._native.record()
            try:
                result = work()
            finally:
                self._native.stop()
        self._refused = recording.refusal
        return result

    def play(self) -> None:
        """Makes the calls again, with what is in the inputs."""
        self._native.play(torch.get_num_threads())

    def play_timed(self) -> list[tuple[Any, float, float]]:
        """The same; of each call what it counts as (`_native.Work`), start and end in seconds."""
        times: list[tuple[Any, float, float]] = self._native.play_timed(torch.get_num_threads())
        return times


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives new tensors memory that stays, and notes the first operator that only torch can do again."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch
        self.refusal: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping loads the compiler: 800 modules, 36 MB

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func in _NEW:
            return self._new(func, args, options)
        with self:  # inference mode hands over operators that are made of others, whole
            made_of_others = func.decompose(*args, **options)
        if made_of_others is not NotImplemented:
            return made_of_others
        if not func.is_view or func is _COPIES_PYTHON:
            self.refusal = self.refusal or f"{func} is left to torch"
        return func(*args, **options)

    def _new(self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
        if func is _aten.empty.memory_format:
            dtype = options.get("dtype") or torch.get_default_dtype()
            return self._scratch.empty(args[0], dtype)
        like, shape = args
        return self._scratch.empty(shape, options.get("dtype") or like.dtype)
