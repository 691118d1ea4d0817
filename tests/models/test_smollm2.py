"""Real weights: the packaged SmolLM2-135M gives transformers' text, from its GGUF file."""

import re
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from kvspan import LLM, SamplingParams
from kvspan.loading.fetch import find_packaged

pytestmark = pytest.mark.weights

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees Celsius. In Fahrenheit that is",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
]
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@pytest.fixture(scope="module")
def packaged() -> Path:
    path = find_packaged("smollm2-135m")
    assert path is not None, "run `kvspan fetch smollm2-135m`"
    return path


def oracle(path: Path) -> transformers.LlamaForCausalLM:
    """transformers' model with the file's weights, read without kvspan and rounded to bf16 likewise."""
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        name = NAMES[block[2] if block else tensor.name.removesuffix(".weight")]
        if name.endswith(("q_proj", "k_proj")):  # llama.cpp interleaves the halves of each head
            heads = values.shape[0] // 64
            values = values.view(heads, 32, 2, -1).transpose(1, 2).reshape(values.shape)
        key = f"model.layers.{block[1]}.{name}.weight" if block else f"{name}.weight"
        weights[key] = values.bfloat16().float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    return model


@pytest.mark.timeout(300)
def test_greedy_text_in_float32(packaged: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "64MiB", "num_threads": 1}
    with LLM(str(packaged), **options) as llm:
        got = llm.generate(PROMPTS, params, use_tqdm=False)
    model = oracle(packaged)
    model.generation_config.eos_token_id = None  # as with ignore_eos: go on
    for result in got:
        prompt = torch.tensor([result.prompt_token_ids])
        wanted = model.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)
        assert list(result.outputs[0].token_ids) == wanted[0, prompt.shape[1] :].tolist()


def test_a_layout_of_processes_gives_one_ranks_text(packaged: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "64MiB", "num_threads": 1}
    messages = [[{"role": "user", "content": "What is the capital of France?"}]]
    with LLM("smollm2-135m", **options) as llm:
        (wanted,) = llm.chat(messages, params, use_tqdm=False)
    spread = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    with LLM("smollm2-135m", **options, **spread) as llm:
        (got,) = llm.chat(messages, params, use_tqdm=False)
    assert got.outputs[0].text == wanted.outputs[0].text == "The capital of France is Paris."
