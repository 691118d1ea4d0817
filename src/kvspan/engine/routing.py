"""Which of several engines gets a request: the one that knows most of its prompt, then the least busy.

What an engine has in its cache is guessed from what was sent there: nobody waits for an answer, and a
wrong guess costs what no guess would. Knows keys of prefixes. Knows no processes.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvspan.cache.prefix import KeySpace

KEYS_KEPT = 1 << 16
"""For each engine: a million tokens in units of 16, the ones sent last."""


class Router:
    """Remembers which prompts went where.

    Args:
        keys: of the engines' caches, which are alike.
        num_replicas: engines.
    """

    def __init__(self, keys: KeySpace, num_replicas: int) -> None:
        self._keys = keys
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_replicas)]

    def choose(
        self, tokens: Sequence[int], *, cache_salt: str, busy: Mapping[int, tuple[int, int]]
    ) -> int:
        """The engine for a request, which from here on is expected to know its prompt.

        Args:
            tokens: of the prompt.
            cache_salt: of the request.
            busy: for each engine that takes requests, how full it is, the first number before the
                second; there is one at least.
        """
        chain = self._chain(tokens, cache_salt)
        best = min(busy, key=lambda replica: (-self._num_known(replica, chain), busy[replica], replica))
        self._remember(best, chain)
        return best

    def remember(self, replica: int, tokens: Sequence[int], *, cache_salt: str) -> None:
        """An engine was given a request without a choice, and is expected to know its prompt."""
        self._remember(replica, self._chain(tokens, cache_salt))

    def forget(self, replica: int) -> None:
        """An engine has begun with an empty cache."""
        self._known[replica].clear()

    def _chain(self, tokens: Sequence[int], cache_salt: str) -> list[bytes]:
        """Keys of a prompt's full units."""
        made = self._keys.keys(tokens, cache_salt=cache_salt)
        return [made.key(index) for index in range(len(tokens) // self._keys.layout.unit_tokens)]

    def _num_known(self, replica: int, chain: Sequence[bytes]) -> int:
        known = self._known[replica]
        return next((i for i, key in enumerate(chain) if key not in known), len(chain))

    def _remember(self, replica: int, chain: Sequence[bytes]) -> None:
        known = self._known[replica]
        for key in reversed(chain):  # as the engine does: of a chain, the tail is forgotten first
            known[key] = None
            known.move_to_end(key)
        while len(known) > KEYS_KEPT:
            known.popitem(last=False)
