"""The sampler against a twin that takes one row and one token at a time, and against chance."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sampling.twin import twin

from kvspan.errors import OutputError
from kvspan.layers.logits import Logits
from kvspan.request import SamplingParams
from kvspan.sampling.logits import adjusted, token_logprobs
from kvspan.sampling.sampler import Sampler, SamplingRow, uniform
from kvspan.step import Sampled, TokenLogprob

V = 12
EOS = (3,)


def row(
    params: SamplingParams,
    *,
    seed: int = 0,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    request_id: int = 7,
    eos: Sequence[int] = EOS,
) -> SamplingRow:
    return SamplingRow(
        request_id=request_id,
        params=params,
        seed=seed,
        position=position,
        prompt_ids=np.array(prompt, dtype=np.int32),
        output_ids=np.array(output, dtype=np.int32),
        eos_token_ids=eos,
    )


def sample_one(logits: Sequence[float], params: SamplingParams, **known: Any) -> Sampled:
    (sampled,) = Sampler().sample(torch.tensor([logits], dtype=torch.float32), [row(params, **known)])
    return sampled


# ---- the naive twin: one token at a time, in plain Python


def naive_adjusted(logits: Sequence[float], r: SamplingRow) -> list[float]:
    p, prompt, output = r.params, r.prompt_ids.tolist(), r.output_ids.tolist()
    result = []
    for token, logit in enumerate(logits):
        value = logit + p.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        if token in output:
            value -= p.presence_penalty + p.frequency_penalty * output.count(token)
        if len(output) < p.min_tokens and (token in r.eos_token_ids or token in p.stop_token_ids):
            value = -math.inf
        result.append(float(np.float32(value)))
    return result


def naive_sample(logits: Sequence[float], r: SamplingRow) -> int:
    final = naive_adjusted(logits, r)
    if r.params.temperature == 0 or r.params.top_k == 1:
        return final.index(max(final))
    return twin(final, r.params, uniform(r.seed, r.position))


logit_lists = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, -math.inf]),
        st.floats(-20, 20, width=32),
    ),
    min_size=V,
    max_size=V,
).filter(lambda xs: sum(x > -math.inf for i, x in enumerate(xs) if i not in (3, 5)) > 0)

tokens = st.integers(0, V - 1)


@st.composite
def rows(draw: st.DrawFn) -> SamplingRow:
    penalty = st.sampled_from([0.0, 0.0, 0.7, -1.5])
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 5, V, 100])),
        top_p=draw(st.sampled_from([1.0, 0.93, 0.51, 0.017])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.07, 0.6])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, 0.5, 3.0]), max_size=3)),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(st.sampled_from([(), (5,)])),
        logprobs=draw(st.sampled_from([None, 0, 3, -1])),
    )
    return row(
        params,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        position=draw(st.integers(0, 10**6)),
        prompt=draw(st.lists(tokens, max_size=6)),
        output=draw(st.lists(tokens, max_size=6)),
        request_id=draw(st.integers(0, 99)),
    )


batches = st.lists(st.tuples(logit_lists, rows()), min_size=1, max_size=6)
Batch = list[tuple[list[float], SamplingRow]]


def tensor(batch: Batch) -> torch.Tensor:
    return torch.tensor([logits for logits, _ in batch], dtype=torch.float32)


@settings(max_examples=100, deadline=None)
@given(batch=batches)
def test_sampler_equals_its_twin(batch: Batch) -> None:
    logits = tensor(batch)
    before = logits.clone()
    sampled = Sampler().sample(logits, [r for _, r in batch])
    assert torch.equal(logits, before)
    wanted = [naive_sample(x, r) for x, (_, r) in zip(before.tolist(), batch, strict=True)]
    assert [s.token_id for s in sampled] == wanted
    assert [s.request_id for s in sampled] == [r.request_id for _, r in batch]


@settings(max_examples=50, deadline=None)
@given(batch=batches)
def test_a_row_alone_is_as_in_a_batch(batch: Batch) -> None:
    together = Sampler().sample(tensor(batch), [r for _, r in batch])
    alone = [Sampler().sample(tensor([entry]), [entry[1]])[0] for entry in batch]
    assert together == alone


def test_an_empty_batch_gives_nothing() -> None:
    assert Sampler().sample(torch.zeros(0, V), []) == []
    assert Sampler().prompt_logprobs(torch.zeros(0, V), [], 3) == []


# ---- the draw


@pytest.mark.parametrize(
    ("seed", "position", "wanted"),
    [
        (0, 0, 0.156742553465558),
        (0, 1, 0.6269999134633438),
        (1, 0, 0.33776134126730917),
        (-1, 131071, 0.7298009700632013),
        (2**63 - 1, 5, 0.4765249520428353),
    ],
)
def test_the_number_of_a_position_is_fixed_for_ever(seed: int, position: int, wanted: float) -> None:
    assert uniform(seed, position) == wanted


def test_numbers_look_uniform() -> None:
    numbers = [uniform(seed, position) for seed in range(20) for position in range(500)]
    assert len(set(numbers)) == 10_000
    counts = Counter(int(10 * u) for u in numbers)
    assert set(counts) == set(range(10))
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 30  # chi-square, 9 degrees


def test_draws_follow_the_probabilities() -> None:
    wanted = np.array([0.4, 0.05, 0.0, 0.25, 0.2, 0.1])
    logits = torch.tensor(wanted).log().float().expand(8_000, -1)
    sampled = Sampler().sample(
        logits, [row(SamplingParams(), seed=5, position=position) for position in range(8_000)]
    )
    counts = np.bincount([s.token_id or 0 for s in sampled], minlength=6)
    assert counts[2] == 0
    some = wanted > 0
    expected = 8_000 * wanted[some]
    assert (((counts[some] - expected) ** 2) / expected).sum() < 25  # chi-square, 4 degrees


def test_the_stream_depends_on_seed_and_position() -> None:
    logits = [0.0] * V

    def stream(seed: int) -> list[int | None]:
        params = SamplingParams()
        return [sample_one(logits, params, seed=seed, position=p).token_id for p in range(40)]

    assert stream(1) == stream(1)
    assert stream(1) != stream(2)
    assert len(set(stream(1))) > 5


def test_noise_in_nearly_equal_logits_does_not_exchange_tokens() -> None:
    quiet = torch.zeros(300, 50)
    noise = 1e-5 * torch.randn(300, 50, generator=torch.Generator().manual_seed(1))
    asked = [row(SamplingParams(), position=p) for p in range(300)]
    first, second = Sampler().sample(quiet, asked), Sampler().sample(quiet + noise, asked)
    assert sum(a.token_id != b.token_id for a, b in zip(first, second, strict=True)) <= 2


# ---- greedy, filters, ties


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)], ids=str)
def test_greedy_takes_the_lowest_id_of_the_most_probable(params: SamplingParams) -> None:
    assert sample_one([1.0, 4.0, -2.0, 4.0, 4.0], params).token_id == 1


@settings(max_examples=50, deadline=None)
@given(logits=logit_lists, seed=st.integers(0, 99))
def test_temperature_0_equals_top_k_1(logits: list[float], seed: int) -> None:
    cold, narrow = SamplingParams(temperature=0.0), SamplingParams(top_k=1)
    assert sample_one(logits, cold, seed=seed) == sample_one(logits, narrow, seed=seed)


@pytest.mark.parametrize("temperature", [5e-324, 1e-10, 1e300])
@pytest.mark.parametrize("top_k", [0, 3])
def test_no_temperature_is_too_extreme(temperature: float, top_k: int) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k)
    logits = [-1e30, 1e30, 9e29, 0.0]
    chosen = {sample_one(logits, params, position=p).token_id for p in range(50)}
    allowed = {1, 2, 3} if top_k else {0, 1, 2, 3}
    assert chosen == ({1} if temperature < 1 else allowed)


# ---- bias, penalties, min_tokens


def test_a_bias_decides() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={2: 100.0, 0: -100.0})
    assert sample_one([9.0, 8.0, 0.0], params).token_id == 2


def test_penalties_by_hand() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    found = adjusted(
        torch.tensor([4.0, -4.0, 4.0, -4.0, 4.0]),
        params,
        prompt_ids=np.array([0, 1, 2], dtype=np.int32),
        output_ids=np.array([2, 3, 3], dtype=np.int32),
        eos_token_ids=EOS,
    )
    assert found.tolist() == [2.0, -8.0, 2.0 - 1.5, -8.0 - 2.0, 4.0]


def test_no_end_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[4])
    logits = [1.0, 0.0, 0.0, 9.0, 8.0]
    found = [sample_one(logits, params, output=[0] * n).token_id for n in range(3)]
    assert found == [0, 0, 3]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_a_penalty_beyond_float32_still_leaves_a_token(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty)
    sampled = sample_one([-2.0, -1.0, 3.0, -math.inf], params, prompt=range(4))
    assert sampled.token_id in (0, 1, 2)


def test_token_ids_may_be_read_only() -> None:
    params = SamplingParams(repetition_penalty=2.0, temperature=0.0)
    prompt = np.frombuffer(np.array([1], dtype="<i4").tobytes(), dtype="<i4")
    asked = SamplingRow(
        request_id=1,
        params=params,
        seed=0,
        position=1,
        prompt_ids=prompt,
        output_ids=prompt[:0],
        eos_token_ids=(),
    )
    assert Sampler().sample(torch.tensor([[3.0, 4.0]]), [asked])[0].token_id == 0


# ---- log-probabilities


def test_reported_logprobs_are_the_models_own() -> None:
    half = math.log(0.5)
    params = SamplingParams(temperature=0.0, logit_bias={0: -100.0}, logprobs=2)
    sampled = sample_one([math.log(0.5), math.log(0.25), math.log(0.25)], params)
    assert sampled.token_id == 1
    own, first, second = sampled.logprobs
    assert own == TokenLogprob(1, pytest.approx(2 * half), 2)
    assert first == TokenLogprob(0, pytest.approx(half), 1)
    assert second == own


def test_a_token_the_model_rules_out_has_minus_infinity() -> None:
    params = SamplingParams(temperature=0.0, logprobs=-1)
    sampled = sample_one([0.0, -math.inf], params)
    assert sampled.logprobs == (
        TokenLogprob(0, 0.0, 1),
        TokenLogprob(0, 0.0, 1),
        TokenLogprob(1, -math.inf, 2),
    )


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(st.tuples(logit_lists, tokens, st.integers(0, V)), max_size=5))
def test_logprobs_equal_the_twins(batch: list[tuple[list[float], int, int]]) -> None:
    logits = torch.tensor([x for x, _, _ in batch], dtype=torch.float32).reshape(len(batch), V)
    owns, counts = torch.tensor([t for _, t, _ in batch], dtype=torch.int64), [k for _, _, k in batch]
    found = token_logprobs(logits, owns, counts)
    assert len(found) == len(batch)
    for entries, (x, own, count) in zip(found, batch, strict=True):
        ranked = sorted(range(V), key=lambda t: (-x[t], t))
        total = math.log(sum(math.exp(v) for v in x))
        listed = [own, *ranked[:count]]
        assert [e.token_id for e in entries] == listed
        assert [e.rank for e in entries] == [ranked.index(t) + 1 for t in listed]
        assert [e.logprob for e in entries] == pytest.approx([x[t] - total for t in listed], abs=1e-5)


def test_prompt_logprobs_of_targets() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    found = Sampler().prompt_logprobs(logits, np.array([0, 1], dtype=np.int32), 1)
    assert found == [
        (
            TokenLogprob(0, pytest.approx(math.log(0.25)), 2),
            TokenLogprob(1, pytest.approx(math.log(0.75)), 1),
        ),
        (
            TokenLogprob(1, pytest.approx(math.log(0.5)), 2),
            TokenLogprob(0, pytest.approx(math.log(0.5)), 1),
        ),
    ]
    assert [len(entries) for entries in Sampler().prompt_logprobs(logits, [0, 1], -1)] == [3, 3]


# ---- logits that cannot be used


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([0.0, math.nan, 1.0], "1 are NaN and 0 infinite"),
        ([0.0, math.inf, 1.0], "0 are NaN and 1 infinite"),
        ([-math.inf] * 3, "0 are NaN and 3 infinite"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_fail_their_row_alone(bad: list[float], words: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    rows = [row(params, request_id=1), row(params, request_id=9, position=4), row(params, request_id=2)]
    good = [0.0, 1.0, 2.0]
    first, failed, last = Sampler().sample(torch.tensor([good, bad, good]), rows)
    assert failed.token_id is None
    assert f"request 9, position 4: of 3 logits {words}" in failed.failure
    assert [first, last] == Sampler().sample(torch.tensor([good, good]), [rows[0], rows[2]])
    assert not first.failure
    with pytest.raises(OutputError, match=words):
        Sampler().prompt_logprobs(torch.tensor([bad]), [0], 1)


def test_plain_rows_get_of_shared_logits_what_they_get_of_all() -> None:
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(2))
    rows = [row(SamplingParams(temperature=i % 2, top_p=1 - i / 10), request_id=i) for i in range(6)]
    assert all(r.is_plain for r in rows)
    shared = Logits.of_one(logits)
    wanted = [sampled.token_id for sampled in Sampler().sample(logits, rows)]
    assert Sampler.plain(shared, shared.best(), rows).tolist() == wanted


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 0},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
    ],
    ids=str,
)
def test_rows_that_ask_for_more_are_not_plain(asked: dict[str, Any]) -> None:
    assert not row(SamplingParams(**{"temperature": 0.0, **asked})).is_plain


def test_min_tokens_that_leaves_nothing_fails_the_row() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=[0, 1])
    sampled = sample_one([0.0, 1.0, -math.inf], params, eos=())
    assert sampled.token_id is None
    assert "request 7 after min_tokens" in sampled.failure
