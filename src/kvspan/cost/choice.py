"""A choice with its reason: what every "auto" becomes."""

from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Choice(Generic[C]):
    """What will run, and why.

    Args:
        value: what.
        why: a sentence of reason; None = it was asked for.
    """

    value: C
    why: str | None = None
