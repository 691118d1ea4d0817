"""SamplingParams: what is refused and in which words, and what crosses to a worker."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from kvspan.errors import RequestError
from kvspan.request import CompletionOutput, FinishReason, RequestOutput, SamplingParams

REFUSED: list[tuple[str, Any, str]] = [
    ("n", 0, "n must be a whole number in [1, 16384], got 0."),
    ("n", 10**9, "n must be a whole number in [1, 16384], got 1000000000."),
    ("n", True, "n must be a whole number in [1, 16384], got True."),
    ("n", 1.0, "n must be a whole number in [1, 16384], got 1.0."),
    ("temperature", -0.1, "temperature must be a number in [0, inf), got -0.1."),
    ("temperature", math.nan, "temperature must be a number in [0, inf), got nan."),
    ("temperature", math.inf, "temperature must be a number in [0, inf), got inf."),
    ("temperature", 10**400, "temperature must be a number in [0, inf), got 1000"),
    ("temperature", "0.5", "temperature must be a number in [0, inf), got '0.5'."),
    ("temperature", None, "temperature must be a number in [0, inf), got None."),
    ("top_k", -2, "top_k must be a whole number of at least -1, got -2."),
    ("top_p", 0, "top_p must be a number in (0, 1], got 0."),
    ("top_p", 1.01, "top_p must be a number in (0, 1], got 1.01."),
    ("min_p", -0.5, "min_p must be a number in [0, 1], got -0.5."),
    ("min_p", 1.5, "min_p must be a number in [0, 1], got 1.5."),
    ("seed", 1.5, "seed must be a whole number of 64 bits, got 1.5."),
    (
        "seed",
        2**63,
        "seed must be a whole number of 64 bits, got 9223372036854775808",
    ),
    ("presence_penalty", 2.1, "presence_penalty must be a number in [-2, 2], got 2.1."),
    ("frequency_penalty", -2.1, "frequency_penalty must be a number in [-2, 2], got -2.1."),
    ("repetition_penalty", 0.0, "repetition_penalty must be a number in (0, inf), got 0.0."),
    ("repetition_penalty", math.inf, "repetition_penalty must be a number in (0, inf), got inf."),
    ("logit_bias", {5: 101}, "logit_bias[5] must be a number in [-100, 100], got 101."),
    ("logit_bias", {5: math.nan}, "logit_bias[5] must be a number in [-100, 100], got nan."),
    ("logit_bias", {-1: 1}, "logit_bias has -1, which is not a token id."),
    ("logit_bias", [5], "logit_bias must map token ids to numbers, got [5]."),
    ("max_tokens", 0, "max_tokens must be a whole number of at least 1, got 0."),
    (
        "max_tokens",
        99999999999999999999,
        "max_tokens must be a whole number of at most 9223372036854775807, got 99999999999999999999.",
    ),
    ("min_tokens", -1, "min_tokens must be a whole number of at least 0, got -1."),
    (
        "min_tokens",
        17,
        "min_tokens 17 is more than max_tokens 16; raise max_tokens or lower min_tokens.",
    ),
    ("stop", "", "stop must be strings that are not empty, got ''."),
    ("stop", ["a", ""], "stop must be strings that are not empty, got ''."),
    ("stop", [5], "stop must be strings that are not empty, got 5."),
    ("stop", None, "stop must be a list of strings, got None."),
    ("stop", {"a"}, "stop must be a list of strings, got {'a'}."),
    ("stop_token_ids", 5, "stop_token_ids must be a list of token ids, got 5."),
    ("stop_token_ids", [-5], "stop_token_ids has -5, which is not a token id."),
    ("stop_token_ids", "12", "stop_token_ids must be a list of token ids, got '12'."),
    ("ignore_eos", 1, "ignore_eos must be true or false, got 1."),
    (
        "include_stop_str_in_output",
        "yes",
        "include_stop_str_in_output must be true or false, got 'yes'.",
    ),
    ("skip_special_tokens", None, "skip_special_tokens must be true or false, got None."),
    ("logprobs", -2, "logprobs must be a whole number of at least -1, got -2."),
    ("logprobs", True, "logprobs must be a whole number of at least -1, got True."),
    ("prompt_logprobs", -2, "prompt_logprobs must be a whole number of at least -1, got -2."),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED, ids=lambda v: str(v)[:30])
def test_a_value_out_of_range_is_refused_in_a_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 160


ACCEPTED: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 1e-300),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 1),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("min_p", 0),
    ("min_p", 1),
    ("seed", -1),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 1e-9),
    ("logit_bias", {0: -100, 7: 100.0}),
    ("max_tokens", None),
    ("min_tokens", 16),
    ("logprobs", 0),
    ("logprobs", -1),
    ("prompt_logprobs", None),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=str)
def test_the_ends_of_each_range_are_accepted(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert msgspec.structs.asdict(params)[name] == value


def test_stop_is_a_string_or_several() -> None:
    assert SamplingParams(stop="own fox").stop == ("own fox",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=()).stop == ()


def test_params_cross_to_a_worker_and_back() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        stop="x",
        stop_token_ids=[np.int32(7)],  # type: ignore[list-item]
        logit_bias={4: 1},
        seed=-5,
    )
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_the_callers_dict_may_change_afterwards() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 1.0}


def test_a_mapping_is_read_as_json_has_it() -> None:
    asked = {
        "temperature": None,
        "max_tokens": None,
        "stop": None,
        "n": 2,
        "logit_bias": {"50256": -100},
    }
    params = SamplingParams.from_mapping(asked)
    assert params == SamplingParams(n=2, max_tokens=None, logit_bias={50256: -100.0})


@pytest.mark.parametrize("key", ["-1", "1.5", "x", "", "9" * 5000])
def test_a_bias_key_that_is_no_id_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="which is not a token id"):
        SamplingParams.from_mapping({"logit_bias": {key: 1.0}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temprature", "did you mean temperature?"),
        ("topk", "did you mean top_k"),
        ("best_of", "ask for n outputs"),
        ("zzz", "there are n, temperature, top_k"),
    ],
)
def test_an_unknown_name_is_refused_with_the_way_out(name: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_mapping({name: 1})
    assert f'"{name}"' in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias={3: 1.0, 100: 1.0}), "logit_bias has token id 100"),
        (SamplingParams(stop_token_ids=[100]), "stop_token_ids has token id 100"),
        (SamplingParams(logprobs=101), "logprobs 101 is more than the 100 tokens"),
        (SamplingParams(prompt_logprobs=101), "prompt_logprobs 101 is more than the 100 tokens"),
        (SamplingParams(min_tokens=1, stop_token_ids=range(99)), "min_tokens 1 leaves no token"),
    ],
)
def test_what_the_vocabulary_rules_out(params: SamplingParams, words: str) -> None:
    params.validate(101, eos_token_ids=[100])
    with pytest.raises(RequestError) as caught:
        params.validate(100, eos_token_ids=[99])
    assert words in str(caught.value)


def test_greedy_by_temperature_or_by_top_k() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(top_k=2).is_greedy


def test_outputs_say_what_they_are() -> None:
    output = CompletionOutput(index=0, text="a", token_ids=(1,), finish_reason=FinishReason.STOP)
    whole = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=(5,), outputs=(output,), finished=True
    )
    assert whole.outputs[0].finish_reason == "stop"
    assert whole.num_cached_tokens == 0
