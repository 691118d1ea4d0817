"""Keys: when two units of cache are the same. Knows tokens and layouts. Knows no pools and no requests.

A unit's keys and values depend on all tokens up to its end, so its key is a chain:

    key[i] = digest(key[i - 1] + the tokens of unit i),   key[-1] = root

The root carries whatever else the content depends on, so that chains of two models, layouts or dtypes
never meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import msgspec

from kvspan.layout import CacheLayout
from kvspan.step import pack_tokens

KEY_BYTES = 16
"""Size of a digest: two of 2^64 different units share a key with odds of about one half."""


class UnitKeys(Protocol):
    """Keys of one request's units, in order. A trace can have them without having tokens."""

    def key(self, index: int) -> bytes:
        """The key of unit `index`, all of whose tokens are known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """What all keys of an engine have in common.

    Args:
        layout: how blocks and ranks share a sequence.
        kv_dtype: dtype in which keys and values are stored.
        model: identity of the weights.
    """

    layout: CacheLayout
    kv_dtype: str
    model: str

    def root(self, *, cache_salt: str = "") -> bytes:
        """The key that comes before a request's first unit.

        Args:
            cache_salt: requests share cache only with those of the same salt.
        """
        sizes = (self.layout.dcp_size, self.layout.interleave, self.layout.block_size)
        content = msgspec.msgpack.encode((*sizes, self.kv_dtype, self.model, cache_salt))
        # `person` keeps roots apart from units, whatever bytes a salt may hold.
        return blake2b(content, digest_size=KEY_BYTES, person=b"kvspan root").digest()

    def keys(self, tokens: Sequence[int], *, cache_salt: str = "") -> "TokenKeys":
        """Keys of a request.

        Args:
            tokens: its prompt and output; a list that grows at the end is followed.
            cache_salt: as for `root`.
        """
        root = self.root(cache_salt=cache_salt)
        return TokenKeys(root, tokens, unit_tokens=self.layout.unit_tokens)


class TokenKeys:
    """Keys made from a request's tokens, each computed once, when it is first asked for.

    Args:
        root: the key before the first unit.
        tokens: prompt and output; may grow at the end.
        unit_tokens: U.
    """

    def __init__(self, root: bytes, tokens: Sequence[int], *, unit_tokens: int) -> None:
        self._tokens = tokens
        self._unit_tokens = unit_tokens
        self._chain = [root]

    def key(self, index: int) -> bytes:
        """The key of unit `index`, all of whose tokens are known."""
        while len(self._chain) <= index + 1:
            start = (len(self._chain) - 1) * self._unit_tokens
            unit = self._tokens[start : start + self._unit_tokens]
            assert len(unit) == self._unit_tokens, "a partial unit has no key"
            content = self._chain[-1] + pack_tokens(unit)
            self._chain.append(blake2b(content, digest_size=KEY_BYTES).digest())
        return self._chain[index + 1]
