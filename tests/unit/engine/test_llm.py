"""The offline API on a tiny model: what users of the field expect of each parameter."""

import itertools
import json
import math
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvspan import (
    LLM,
    ConfigError,
    EngineDeadError,
    LayoutError,
    ModelError,
    RequestError,
    SamplingParams,
)
from kvspan.loading.resolve import resolve
from kvspan.request import FinishReason
from kvspan.step import Step, StepResult
from kvspan.testing.checkpoints import spoil_token, write_checkpoint, write_tokenizer
from kvspan.testing.forward import ForwardCase, forward
from kvspan.testing.tiny import TINY

OPTIONS = {"kv_cache_memory": "8MiB", "max_model_len": 128, "num_threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, TINY["llama-gqa"], seed=5)
    write_tokenizer(directory, vocab_size=203)
    return directory


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **OPTIONS) as running:
        yield running


def test_prompts_in_every_form(llm: LLM) -> None:
    text, ids = "hello", llm.get_tokenizer().encode("hello")
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids]
    results = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({r.outputs[0].token_ids for r in results}) == 1
    assert [r.prompt for r in results] == [text, text, None, None]
    assert all(r.prompt_token_ids == tuple(ids) and r.finished for r in results)
    assert llm.generate(text, GREEDY, use_tqdm=False)[0].outputs[0].text == results[0].outputs[0].text
    assert len(llm.generate(ids, GREEDY, use_tqdm=False)) == 1


def test_requests_that_say_nothing_are_sampled_as_the_model_says(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    said = {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "max_new_tokens": 5, "eos_token_id": [2, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        params = SamplingParams(temperature=0.6, top_k=1, top_p=0.9, max_tokens=5)
        assert llm.get_default_sampling_params() == params
        assert llm.resolved.model_config.eos_token_ids == (2, 9)
        assert any("temperature 0.6, top_p 0.9, top_k 1" in note for note in llm.resolved.notes)
        (said_nothing,) = llm.generate("hello", use_tqdm=False)
        (said_the_same,) = llm.generate("hello", params, use_tqdm=False)
        assert said_nothing.outputs[0].token_ids == said_the_same.outputs[0].token_ids
        assert len(list(llm.stream("hello"))) == len(said_nothing.outputs[0].token_ids)
    with LLM(str(tmp_path), **OPTIONS, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with LLM(str(model), **OPTIONS, generation_config=str(tmp_path)) as llm:
        assert llm.get_default_sampling_params() == params
        assert 9 in llm.resolved.model_config.eos_token_ids


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert llm.get_tokenizer().decode(result.prompt_token_ids) == "[user]hi>"
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_a_stream_is_the_output_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    pieces = list(llm.stream("hello", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert pieces[-1].generation.result().outputs == whole.outputs


def test_a_closed_stream_gives_its_blocks_back(llm: LLM) -> None:
    free = llm.engine.core.free_tokens
    pieces = llm.stream("hello", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    list(itertools.islice(pieces, 3))
    assert llm.engine.core.free_tokens < free
    pieces.close()
    assert llm.engine.core.free_tokens == free
    assert not llm.engine.has_work
    llm.engine.core.check()


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[3:5]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[stop, "never there"])
    (output,) = llm.generate("hello", params, use_tqdm=False)[0].outputs
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert len(output.token_ids) < 8
    assert llm.engine.core.free_tokens == llm.engine.core.plan.tokens_total


def test_a_stop_token_ends_it_and_min_tokens_puts_it_off(llm: LLM) -> None:
    tokens = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stop = tokens[2]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate("hello", params, use_tqdm=False)[0].outputs
    end = tokens.index(stop) + 1
    assert output.token_ids == tokens[:end]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    later = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop], min_tokens=6
    )
    (output,) = llm.generate("hello", later, use_tqdm=False)[0].outputs
    assert len(output.token_ids) >= 6
    assert stop not in output.token_ids[:6]


def test_logits_that_are_no_numbers_end_their_output_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY["llama-gqa"], seed=5)
    spoil_token(tmp_path, 50)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        good, bad, scored = llm.generate(
            [[10, 11], [10, 50], [50, 10, 11]],
            [GREEDY, GREEDY, SamplingParams(prompt_logprobs=1)],
            use_tqdm=False,
        )
        for failed in (bad.outputs[0], scored.outputs[0]):
            assert (failed.token_ids, failed.finish_reason) == ((), FinishReason.ERROR)
            assert "203 logits 203 are NaN" in failed.error
        assert good.outputs[0].error is None
        assert llm.generate([10, 11], GREEDY, use_tqdm=False)[0].outputs == good.outputs
        llm.engine.core.check()
        assert llm.engine.core.free_tokens == llm.engine.core.plan.tokens_total


@pytest.mark.parametrize("exchange", ["a2a", "ag_rs"])
@pytest.mark.parametrize("ranks", [{}, {"tensor": 2}, {"prefill_context": 2}], ids=str)
def test_queries_that_overflow_are_no_answer(
    tmp_path: Path, ranks: dict[str, int], exchange: str
) -> None:
    weights = write_checkpoint(tmp_path, TINY["llama-gqa"], seed=5)
    weights["model.layers.0.self_attn.q_proj.weight"] *= 1e38  # what is added to its output stays finite
    weights["model.layers.0.self_attn.q_proj.weight"] *= 100
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {f"{axis}_parallel_size": size for axis, size in ranks.items()}
    if ranks:
        options |= {"decode_context_parallel_size": 2, "distributed_executor_backend": "inprocess"}
    with LLM(str(tmp_path), **OPTIONS, **options, dcp_comm_backend=exchange) as llm:
        (bad,) = llm.generate([list(range(10, 60))], GREEDY, use_tqdm=False)
    assert bad.outputs[0].finish_reason == FinishReason.ERROR
    assert "203 logits 203 are NaN" in str(bad.outputs[0].error)


def test_length_ends_at_max_tokens_and_at_max_model_len(llm: LLM) -> None:
    prompt = list(range(3, 123))  # 120 of 128 tokens
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (8, FinishReason.LENGTH)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    assert len(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_several_outputs_are_drawn_from_streams_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.5, max_tokens=8, seed=9, ignore_eos=True)
    (result,) = llm.generate("hello", params, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in result.outputs}) == 3
    beside = llm.generate(["other", "hello"], [GREEDY, params], use_tqdm=False)[1]
    assert beside.outputs == result.outputs


def test_without_a_seed_requests_differ_and_engines_repeat(model: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(str(model), **OPTIONS, seed=4) as llm:
            results = llm.generate(["hello", "hello"], params, use_tqdm=False)
            runs.append([r.outputs[0].token_ids for r in results])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_logprobs_are_the_models(llm: LLM, model: Path) -> None:
    prompt = [7, 99, 3, 150, 42]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    (output,) = result.outputs
    sequence = [*prompt, *output.token_ids]
    (logits,) = forward(resolve(str(model)), [sequence], ForwardCase()).logits
    wanted = logits.log_softmax(-1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    assert output.logprobs is not None
    listed = [*result.prompt_logprobs[1:], *output.logprobs]
    for position, entry in enumerate(listed):
        assert entry is not None
        token = sequence[position + 1]
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(wanted[position, token_id].item(), abs=1e-4)
        best = wanted[position].argmax().item()
        assert entry[best].rank == 1
        assert token in entry
    total = math.fsum(
        entry[t].logprob for entry, t in zip(output.logprobs, output.token_ids, strict=True)
    )
    assert output.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_a_warm_cache_and_chunks(model: Path) -> None:
    prompt = torch.randint(203, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for budget in (128, 16):
        with LLM(str(model), **OPTIONS, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
            for _ in ("cold", "warm"):
                (result,) = llm.generate(prompt, params, use_tqdm=False)
                assert result.prompt_logprobs is not None
                pairs = zip(result.prompt_logprobs[1:], prompt[1:], strict=True)
                found.append([entry[t].logprob for entry, t in pairs if entry is not None])
    assert all(len(run) == 99 for run in found)
    for run in found[1:]:
        assert run == pytest.approx(found[0], abs=1e-4)


def test_a_batch_mixes_everything(llm: LLM) -> None:
    mixed = [
        GREEDY,
        SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1, seed=2, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, frequency_penalty=1.0, presence_penalty=0.5, max_tokens=8),
        SamplingParams(temperature=0, logit_bias={7: 50.0}, max_tokens=3, ignore_eos=True),
        SamplingParams(top_k=1, max_tokens=8, ignore_eos=True),
    ]
    alone = [llm.generate("hello", p, use_tqdm=False)[0].outputs for p in mixed]
    together = [r.outputs for r in llm.generate(["hello"] * len(mixed), mixed, use_tqdm=False)]
    assert [o[0].token_ids for o in together] == [o[0].token_ids for o in alone]
    assert together[5][0].token_ids == (7, 7, 7)
    assert together[6][0].token_ids == together[0][0].token_ids


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 203], "203"),
        ([-1], "-1"),
        (list(range(3, 131)), "128"),
        ({"text": "x"}, "prompt_token_ids"),
        (None, "NoneType"),
        ([1.5], "1.5"),
        ([True], "True"),
        (b"bytes", "bytes"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_bad_prompt_is_refused_and_others_are_untouched(llm: LLM, prompt: object, says: str) -> None:
    steps = llm.engine.core.stats.steps
    with pytest.raises(RequestError, match=says):
        llm.generate(["fine", prompt], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    assert llm.engine.core.stats.steps == steps
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("count", [21, -1])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_memory_is_for_are_refused(llm: LLM, name: str, count: int) -> None:
    with pytest.raises(RequestError, match=f"{name} .* --max-logprobs is 20"):
        llm.generate("fine", SamplingParams(**{name: count}), use_tqdm=False)
    most = SamplingParams(max_tokens=1, **{name: 20})
    assert llm.generate("fine", most, use_tqdm=False)[0].finished


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY["llama-gqa"], seed=5)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.generate([3, 4], GREEDY, use_tqdm=False)[0].outputs[0].text == ""
        with pytest.raises(RequestError, match="tokenizer"):
            llm.generate("text", GREEDY)
        with pytest.raises(RequestError, match="stop_token_ids"):
            llm.generate([3], SamplingParams(stop="x"))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tensor_parallel_size": 3}, LayoutError, "8 attention heads"),
        ({"tensor_parallel_size": 8, "decode_context_parallel_size": 3}, LayoutError, "does not divide"),
        ({"block_size": 12}, ConfigError, "multiple of 8"),
        ({"cp_kv_cache_interleave_size": 12, "block_size": 16}, LayoutError, "divide"),
        ({"max_model_len": 10**6}, ConfigError, "4096"),
        ({"kv_cache_memory": "4KiB"}, ConfigError, "--kv-cache-memory"),
        ({"tensor_paralel_size": 2}, ConfigError, "tensor"),
        ({"quantization": "awq"}, ConfigError, "quantization"),
        ({"dtype": "int3"}, ConfigError, "int3"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(
    model: Path, options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as refusal:
        LLM(str(model), **{**OPTIONS, **options})
    assert isinstance(refusal.value, ValueError)
    assert "\n" not in str(refusal.value)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        LLM("no-such-model")


class Interrupted:
    """An executor to which Ctrl-C comes while it waits for a step, some times."""

    def __init__(self, inner: object, *, times: int) -> None:
        self.inner, self.times = inner, times

    def submit(self, step: Step) -> None:
        self.inner.submit(step)

    def collect(self) -> StepResult:
        while self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)
        return self.inner.collect()

    def shutdown(self) -> None:
        self.inner.shutdown()


def test_ctrl_c_waits_for_the_step_and_leaves_a_working_engine(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        wanted = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs
        core = llm.engine.core
        core._executor = Interrupted(core._executor, times=1)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("another one", GREEDY, use_tqdm=False)
        assert core.free_tokens == core.plan.tokens_total
        assert llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs == wanted
        core.check()


def test_a_second_ctrl_c_breaks_the_step_off_and_ends_the_engine(model: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm:
        core = llm.engine.core
        core._executor = Interrupted(core._executor, times=2)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="broken off by KeyboardInterrupt"):
            llm.generate("hello", GREEDY, use_tqdm=False)


def test_streams_beside_one_another_keep_their_text_apart(llm: LLM) -> None:
    prompts = ["hello", "other words", "x"]
    wanted = [r.outputs[0].text for r in llm.generate(prompts, GREEDY, use_tqdm=False)]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", "", ""]
    for turn in itertools.zip_longest(*streams):
        for i, piece in enumerate(turn):
            texts[i] += piece.text if piece is not None else ""
    assert texts == wanted
    first = llm.stream("hello", GREEDY)
    begun = next(first).text
    assert llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text == wanted[2]
    assert begun + "".join(piece.text for piece in first) == wanted[0]


def test_threads_share_an_engine(llm: LLM) -> None:
    prompts = ["hello", "other words", "x", "and more"]
    wanted = [r.outputs[0].text for r in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda p: llm.generate(p, GREEDY, use_tqdm=False), prompts))
    assert [results[0].outputs[0].text for results in got] == wanted
