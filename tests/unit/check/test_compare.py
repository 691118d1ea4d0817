"""The verdict's arithmetic: equal runs hold, and each kind of difference is found."""

import dataclasses

import numpy as np
import pytest

from kvspan.check.compare import Position, compare_exact, compare_narrow

RNG = np.random.default_rng(1)


def run(count: int = 400) -> list[list[Position]]:
    return [[Position(float(x), 7, 1.0) for x in RNG.normal(-2, 1, count)]]


def noisy(positions: list[list[Position]], spread: float, flips: int = 0) -> list[list[Position]]:
    (row,) = positions
    moved = [dataclasses.replace(p, logprob=p.logprob + RNG.normal(0, spread)) for p in row]
    return [[dataclasses.replace(p, best=8) if i < flips else p for i, p in enumerate(moved)]]


def test_exact_runs_that_are_equal_hold() -> None:
    wanted = run()
    compared = compare_exact("x", wanted, wanted)
    assert compared.holds
    assert (compared.num_tokens, compared.different, compared.worst) == (400, 0, 0.0)


def test_one_token_or_one_log_probability_is_enough_to_fail() -> None:
    (row,) = wanted = run()
    other = [[dataclasses.replace(row[0], best=8), *row[1:]]]
    assert not compare_exact("x", wanted, other).holds
    shifted = [[dataclasses.replace(row[0], logprob=row[0].logprob + 2e-4), *row[1:]]]
    assert not compare_exact("x", wanted, shifted).holds
    assert not compare_exact("x", wanted, [row[:-1]]).holds


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.15, True), (1.6, False), (10.0, False)])
def test_a_narrow_run_may_be_little_farther_than_one_rank(factor: float, holds: bool) -> None:
    exact = run(20_000)
    compared = compare_narrow("x", exact, noisy(exact, 0.02), noisy(exact, 0.02 * factor))
    assert compared.holds is holds
    assert compared.one_rank.num_positions == 20_000
    assert compared.one_rank.median == pytest.approx(0.02 * 0.6745, rel=0.05)  # of a normal's size
    assert compared.one_rank.p99 == pytest.approx(0.02 * 2.576, rel=0.05)


@pytest.mark.parametrize(("flips", "holds"), [(0, True), (9, True), (10, False)])
def test_flips_beyond_one_ranks_are_rare_events(flips: int, holds: bool) -> None:
    exact = run()
    near = noisy(exact, 0.02)
    far = [[dataclasses.replace(p, best=8) if i < flips else p for i, p in enumerate(near[0])]]
    assert compare_narrow("x", exact, near, far).holds is holds


def test_a_flip_between_near_ties_does_not_count() -> None:
    (row,) = run()
    exact = [[dataclasses.replace(p, gap=0.001) for p in row]]
    near = noisy(exact, 0.02)
    compared = compare_narrow("x", exact, near, noisy(exact, 0.02, flips=400))
    assert compared.layout_flips == 0
