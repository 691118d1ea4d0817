"""Outputs held to a form, through the whole engine: every layout gives the same tokens, and all fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvspan import LLM, RequestError, SamplingParams, StructuredOutputsParams
from kvspan.request import FinishReason
from kvspan.testing.checkpoints import write_checkpoint, write_tokenizer
from kvspan.testing.tiny import TINY

OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_threads": 1, "dtype": "float32", "block_size": 8}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(regex="[a-f]{20}"),
    StructuredOutputsParams(choice=["red", "green"]),
]
PROMPTS = ["a", "a long prompt of more than one block " * 3, "b"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    write_tokenizer(directory, vocab_size=203)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_memory="8MiB", **OPTIONS) as running:
        yield running


def params(form: StructuredOutputsParams | None, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1, "seed": 3, "max_tokens": 60, **more}, structured_outputs=form
    )


def run(llm: LLM) -> list[tuple[str, tuple[int, ...]]]:
    asked = [params(form) for form in FORMS] + [params(None, max_tokens=9)]
    outputs = llm.generate([*PROMPTS, "c"], asked, use_tqdm=False)
    assert all(o.outputs[0].finish_reason is FinishReason.STOP for o in outputs[:3])
    llm.engine.core.check()
    return [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs]


def test_forms_fit_beside_free_text(llm: LLM) -> None:
    texts = [text for text, _ in run(llm)]
    value = json.loads(texts[0])
    assert 0 <= value["a"] <= 999
    assert value["b"] in ("x", "yy")
    assert len(texts[1]) == 20
    assert set(texts[1]) <= set("abcdef")
    assert texts[2] in ("red", "green")


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.timeout(120)
def test_every_layout_gives_the_same_tokens(llm: LLM, model: Path, layout: dict[str, Any]) -> None:
    expected = run(llm)
    with LLM(str(model), kv_cache_memory="8MiB", **OPTIONS, **layout) as other:
        assert run(other) == expected


def test_a_preempted_form_goes_on_where_it_was(llm: LLM, model: Path) -> None:
    asked = params(StructuredOutputsParams(regex="[a-f]{60}"), max_tokens=80)
    prompts = [f"{i} " * 8 for i in range(4)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, asked, use_tqdm=False)]
    bytes_a_token = llm.engine.core.reports[0].kv_bytes_per_token
    small = {**OPTIONS, "max_model_len": 128, "kv_cache_memory": 8 * 22 * bytes_a_token}
    with LLM(str(model), **small) as tight:
        found = [o.outputs[0].token_ids for o in tight.generate(prompts, asked, use_tqdm=False)]
        assert tight.engine.core.stats.preemptions > 0
    assert found == expected


def test_each_of_n_outputs_has_a_form_of_its_own(llm: LLM) -> None:
    (result,) = llm.generate("n", params(FORMS[1], n=4), use_tqdm=False)
    texts = [output.text for output in result.outputs]
    assert all(len(text) == 20 and set(text) <= set("abcdef") for text in texts)
    assert len(set(texts)) > 1


def test_a_hit_prefix_changes_nothing(llm: LLM) -> None:
    once, again = (llm.generate(PROMPTS[1], params(FORMS[0]), use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == once.outputs[0].token_ids


@pytest.mark.parametrize("more", [{"min_tokens": 50}, {"ignore_eos": True}, {"temperature": 0}], ids=str)
def test_the_form_goes_before_other_wishes(llm: LLM, more: dict[str, Any]) -> None:
    asked = params(FORMS[2], **more)
    (result,) = llm.generate("x", asked, use_tqdm=False)
    assert result.outputs[0].text in ("red", "green")
    assert result.outputs[0].finish_reason is FinishReason.STOP


def test_stop_tokens_that_the_form_needs_do_not_end_the_engine(llm: LLM) -> None:
    ids = tuple(llm.get_tokenizer().encode("rg"))
    asked = params(FORMS[2], stop_token_ids=ids, min_tokens=3)
    (result,) = llm.generate("x", asked, use_tqdm=False)
    assert result.outputs[0].text in ("red", "green")


def test_a_form_that_no_token_can_write_ends_its_request_alone(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("\u4e00")) != "\u4e00", "its bytes are tokens"
    asked = params(StructuredOutputsParams(choice=["a\u4e00"]))
    results = llm.generate(["x", "y"], [asked, params(FORMS[2])], use_tqdm=False)
    assert [r.outputs[0].finish_reason for r in results] == [FinishReason.ERROR, FinishReason.STOP]
    assert results[0].outputs[0].text.startswith("a")


def test_a_form_crosses_processes_whole() -> None:
    for form in FORMS:
        packed = msgspec.msgpack.encode(params(form))
        assert msgspec.msgpack.decode(packed, type=SamplingParams) == params(form)


def test_a_bad_schema_is_refused_and_others_go_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Invalid type"):
        llm.generate("x", params(StructuredOutputsParams(json={"type": "strang"})), use_tqdm=False)
    assert not llm.engine.has_work
    run(llm)


def test_the_mapping_of_a_request_names_forms_too() -> None:
    read = SamplingParams.from_mapping({"structured_outputs": {"choice": ["a"]}})
    assert read.structured_outputs == StructuredOutputsParams(choice=["a"])
    with pytest.raises(RequestError, match="use structured_outputs"):
        SamplingParams.from_mapping({"guided_decoding": {}})
