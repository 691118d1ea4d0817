"""Reads keys of a config and names the file and the key when one is not as it must be."""

import math
from collections.abc import Mapping
from typing import Any

from kvspan.errors import ModelError


class Reader:
    """A mapping whose values are checked as they are read.

    Args:
        raw: the mapping.
        where: file to name in errors.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def has(self, key: str) -> bool:
        """Whether there is a value at `key`; null is none."""
        return self.raw.get(key) is not None

    def get(self, key: str, kinds: type | tuple[type, ...], *, default: Any) -> Any:
        """The value at `key`, or `default` when there is none."""
        return self._checked(key, kinds) if self.has(key) else default

    def required(self, key: str, kinds: type | tuple[type, ...]) -> Any:
        """The value at `key`; a missing one is an error."""
        if not self.has(key):
            raise ModelError(f'{self.where}: the key "{key}" is missing.')
        return self._checked(key, kinds)

    def positive(self, key: str, *, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value: int = self.required(key, int) if default is None else self.get(key, int, default=default)
        if value < 1:
            raise ModelError(f'{self.where}: "{key}" is {value}; it must be at least 1.')
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        kinds = (int, float)
        return float(
            self.required(key, kinds) if default is None else self.get(key, kinds, default=default)
        )

    def positive_number(self, key: str, *, default: float | None = None) -> float:
        """A finite number over 0; without a default it must be there."""
        value = self.number(key, default=default)
        if not 0 < value < math.inf:
            raise ModelError(f'{self.where}: "{key}" is {value}; it must be finite and over 0.')
        return value

    def one_of(self, key: str, words: tuple[str, ...], *, default: str) -> str:
        """One of the words that kvspan knows."""
        word: str = self.get(key, str, default=default)
        if word not in words:
            raise ModelError(f'{self.where}: unknown {key} "{word}" (has {", ".join(words)}).')
        return word

    def _checked(self, key: str, kinds: type | tuple[type, ...]) -> Any:
        value = self.raw[key]
        wrong_bool = isinstance(value, bool) and kinds is not bool
        if wrong_bool or not isinstance(value, kinds):
            raise ModelError(f'{self.where}: "{key}" has the unexpected value {value!r}.')
        return value
