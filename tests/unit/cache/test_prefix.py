"""Keys are equal exactly where the content is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvspan.cache.prefix import KeySpace, TokenKeys
from kvspan.layout import CacheLayout

LAYOUT = CacheLayout(block_size=4, dcp_size=2, interleave=4)
SPACE = KeySpace(layout=LAYOUT, kv_dtype="bf16", model="tiny")


def chain(tokens: list[int], space: KeySpace = SPACE, salt: str = "") -> list[bytes]:
    keys = space.keys(tokens, cache_salt=salt)
    return [keys.key(i) for i in range(len(tokens) // space.layout.unit_tokens)]


@given(st.lists(st.integers(0, 1), max_size=24), st.lists(st.integers(0, 1), max_size=24))
def test_keys_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]) -> None:
    for index, (one, other) in enumerate(zip(chain(a), chain(b), strict=False)):
        end = (index + 1) * LAYOUT.unit_tokens
        assert (one == other) == (a[:end] == b[:end])


def test_a_key_depends_on_what_came_before_its_unit() -> None:
    first, second = chain([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second
    assert len(first) == 16


@pytest.mark.parametrize(
    "other",
    [
        KeySpace(
            layout=CacheLayout(block_size=4, dcp_size=2, interleave=2), kv_dtype="bf16", model="tiny"
        ),
        KeySpace(
            layout=CacheLayout(block_size=4, dcp_size=4, interleave=4), kv_dtype="bf16", model="tiny"
        ),
        KeySpace(
            layout=CacheLayout(block_size=8, dcp_size=1, interleave=8), kv_dtype="bf16", model="tiny"
        ),
        KeySpace(layout=LAYOUT, kv_dtype="fp8", model="tiny"),
        KeySpace(layout=LAYOUT, kv_dtype="bf16", model="tinier"),
    ],
    ids=["interleave", "dcp_size", "block_size", "kv_dtype", "model"],
)
def test_chains_of_two_engines_never_meet(other: KeySpace) -> None:
    tokens = list(range(32))
    assert not set(chain(tokens)) & set(chain(tokens, other))
    assert SPACE.root() != other.root()


def test_the_same_prompt_under_two_interleaves_is_no_cross_hit() -> None:
    chains = [
        chain(list(range(256)), KeySpace(layout=layout, kv_dtype="bf16", model="tiny"))
        for layout in (CacheLayout(block_size=16, dcp_size=4, interleave=i) for i in (1, 16))
    ]
    assert [len(keys) for keys in chains] == [4, 16]
    assert not set(chains[0]) & set(chains[1])


def test_chains_of_two_salts_never_meet() -> None:
    tokens = list(range(32))
    assert not set(chain(tokens)) & set(chain(tokens, salt="tenant 1"))
    assert chain(tokens, salt="tenant 1") == chain(tokens, salt="tenant 1")


def test_neighbouring_fields_of_a_root_do_not_run_together() -> None:
    one = KeySpace(layout=LAYOUT, kv_dtype="bf16", model="a")
    assert one.root(cache_salt="bc") != KeySpace(layout=LAYOUT, kv_dtype="bf16", model="ab").root(
        cache_salt="c"
    )


@given(st.lists(st.integers(0, 9), min_size=16, max_size=32), st.lists(st.integers(0, 7), max_size=4))
def test_keys_follow_tokens_that_grow(tokens: list[int], asked: list[int]) -> None:
    growing = tokens[:8]
    keys = TokenKeys(SPACE.root(), growing, unit_tokens=4)
    early = [keys.key(0), keys.key(1)]
    growing.extend(tokens[8:])
    whole = chain(tokens)
    assert early == whole[:2]
    for index in (i for i in asked if i < len(whole)):  # in any order, again and again
        assert keys.key(index) == whole[index]


def test_a_partial_unit_has_no_key() -> None:
    keys = SPACE.keys([1, 2, 3, 4, 5, 6, 7])
    keys.key(0)
    with pytest.raises(AssertionError, match="partial"):
        keys.key(1)
