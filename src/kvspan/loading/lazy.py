"""What every kind of checkpoint offers: a config, and tensors that are read in parts.

Names are those of Hugging Face whatever the file calls them. Knows no file format and no model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvspan.topology import Span


class LazyTensor(Protocol):
    """A tensor of a checkpoint: its name and shape are known, its values are not read yet."""

    @property
    def name(self) -> str:
        """Its Hugging Face name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    @property
    def where(self) -> str:
        """The file it lies in, for errors."""
        ...

    def read(self, take: Sequence[Span]) -> Tensor:
        """Reads one part, and no more than that from the disk.

        Args:
            take: the part, one span for each dim; it may be empty.

        Returns:
            A tensor of the spans' sizes in the stored dtype; bfloat16 if it is stored quantised.
        """
        ...


class Checkpoint(Protocol):
    """A model's config and weights."""

    @property
    def raw_config(self) -> Mapping[str, Any]:
        """The config in the form of a Hugging Face `config.json`."""
        ...

    @property
    def where(self) -> str:
        """The file or directory, for errors."""
        ...

    def tensors(self, wanted: Mapping[str, tuple[int, ...]], /) -> Iterator[LazyTensor]:
        """All tensors, in the order in which they are best read.

        Args:
            wanted: name -> shape of what the model needs. Files have what they have and do not look
                at it; a checkpoint without files makes exactly this.
        """
        ...
