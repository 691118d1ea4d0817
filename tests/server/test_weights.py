"""The cases that need a real tokenizer, on SmolLM2: stop strings, half characters, templates."""

import asyncio
from typing import Any

import pytest

from kvspan import AsyncLLM, SamplingParams

pytestmark = [pytest.mark.weights, pytest.mark.timeout(120)]
FOX = "The quick brown fox jumps over the lazy dog."


async def pieces(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> list[str]:
    stream = llm.add(prompt, params)
    return [piece.text async for step in stream for piece in step if piece.token_id is not None]


async def _cases() -> None:
    options: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_model_len": 512, "num_threads": 1}
    async with AsyncLLM("smollm2-135m", **options) as llm:
        await _stop_across_tokens(llm)
        await _characters_over_tokens(llm)


async def _stop_across_tokens(llm: AsyncLLM) -> None:
    """The model repeats a sentence; "own fox" begins inside " brown" and ends with " fox"."""
    prompt = f"{FOX} {FOX} {FOX} The"
    plain = "".join(await pieces(llm, prompt, SamplingParams(temperature=0, max_tokens=8)))
    assert plain.startswith(" quick brown fox jumps")
    stopped = await pieces(llm, prompt, SamplingParams(temperature=0, max_tokens=8, stop="own fox"))
    assert "".join(stopped) == " quick br"
    newline = SamplingParams(temperature=0, max_tokens=8, stop="\n<|endoftext|>")
    assert "".join(await pieces(llm, prompt, newline)) == plain


async def _characters_over_tokens(llm: AsyncLLM) -> None:
    """Emoji of several tokens, drawn at random over and over: joined chunks are the whole."""
    prompt = "🦊🐢🎉 🦊🐢🎉 🦊🐢🎉 🦊🐢🎉"
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=48, ignore_eos=True)
    stream = llm.add(prompt, params)
    found = [piece.text async for step in stream for piece in step]
    whole = stream.generation.result().outputs[0]
    assert "".join(found) == whole.text
    ids = [*stream.generation.prompt_ids, *whole.token_ids]
    assert llm.get_tokenizer().decode(ids) == prompt + whole.text
    assert any(text == "" for text in found[:-1])  # half a character waited
    assert not any("\ufffd" in text for text in found[:-1])


def test_cases() -> None:
    asyncio.run(_cases())
