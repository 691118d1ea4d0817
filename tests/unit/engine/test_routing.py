"""Requests go where their prefix is, else where least is going on."""

from kvspan.cache.prefix import KeySpace
from kvspan.engine import routing
from kvspan.engine.routing import Router
from kvspan.layout import CacheLayout

LAYOUT = CacheLayout(block_size=16, dcp_size=1, interleave=16)
IDLE = {0: (0, 0), 1: (0, 0), 2: (0, 0)}


def router() -> Router:
    return Router(KeySpace(layout=LAYOUT, kv_dtype="float32", model="m"), 3)


def choose(router: Router, tokens: list[int], busy: dict[int, tuple[int, int]], salt: str = "") -> int:
    return router.choose(tokens, cache_salt=salt, busy=busy)


def test_the_least_busy_gets_what_nobody_knows() -> None:
    assert choose(router(), list(range(40)), {0: (500, 1), 1: (80, 3), 2: (80, 2)}) == 2


def test_the_longest_known_prefix_wins_over_how_busy_one_is() -> None:
    some = router()
    assert choose(some, list(range(64)), {1: (0, 0)}) == 1
    assert choose(some, list(range(32)), {2: (0, 0)}) == 2
    assert choose(some, [*range(64), 99, 98], {**IDLE, 1: (9000, 9)}) == 1
    assert choose(some, [*range(20), 7], {**IDLE, 2: (9000, 9), 1: (9000, 10)}) == 2


def test_prompts_under_a_unit_and_other_salts_are_known_to_nobody() -> None:
    some = router()
    choose(some, list(range(64)), {2: (0, 0)})
    assert choose(some, list(range(15)), {**IDLE, 0: (1, 1)}) == 1
    assert choose(some, list(range(64)), IDLE, "salt") == 0


def test_one_that_has_begun_again_knows_nothing() -> None:
    some = router()
    choose(some, list(range(64)), {2: (0, 0)})
    some.forget(2)
    assert choose(some, list(range(64)), IDLE) == 0


def test_what_was_sent_long_ago_is_forgotten_tail_first(monkeypatch) -> None:
    monkeypatch.setattr(routing, "KEYS_KEPT", 6)
    some = router()
    choose(some, list(range(64)), {1: (0, 0)})  # 4 units
    choose(some, list(range(100, 164)), {1: (0, 0)})
    assert choose(some, list(range(48)), IDLE) == 1  # two of them are left
    assert choose(some, list(range(100, 164)), IDLE) == 1
