import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvspan.config.model import parse_model_config
from kvspan.errors import ModelError
from kvspan.loading.gguf import open_gguf
from kvspan.loading.gguf_file import read_gguf
from kvspan.loading.lazy import LazyTensor
from kvspan.topology import Span

QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"


def whole(tensor: LazyTensor) -> torch.Tensor:
    return tensor.read([Span(0, n) for n in tensor.shape])


def part_of(values: torch.Tensor, take: Sequence[Span]) -> torch.Tensor:
    return values[tuple(slice(span.start, span.stop) for span in take)]


@pytest.mark.parametrize(
    ("arch", "architecture", "changes"),
    [
        ("llama", "LlamaForCausalLM", {}),
        ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("qwen2", QWEN2, {}),
        ("qwen3", QWEN3, {}),
    ],
    ids=["llama", "llama-bias", "llama-tied", "qwen2", "qwen3"],
)
def test_names_values_and_config_are_those_of_hugging_face(
    write_gguf: Callable[..., Any],
    config: Callable[..., dict[str, Any]],
    arch: str,
    architecture: str,
    changes: dict[str, Any],
) -> None:
    raw_config = config(architecture, **changes)
    path, expected = write_gguf(arch, raw_config)
    checkpoint = open_gguf(path)
    found = {tensor.name: whole(tensor) for tensor in checkpoint.tensors({})}
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name
    ours = parse_model_config(checkpoint.raw_config, where=checkpoint.where)
    theirs = parse_model_config(raw_config | {"torch_dtype": "bfloat16"}, where="test")
    if architecture == QWEN2:  # has biases whatever its config says
        theirs = parse_model_config(
            raw_config | {"torch_dtype": "bfloat16", "attention_bias": True}, where="test"
        )
    assert ours == theirs


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_every_kind_becomes_what_it_stands_for(write_gguf: Callable[..., Any], kind: str) -> None:
    path, expected = write_gguf(kind=GGMLQuantizationType[kind])
    for tensor in open_gguf(path).tensors({}):
        found = whole(tensor)
        assert found.dtype == expected[tensor.name].dtype
        assert torch.equal(found, expected[tensor.name]), tensor.name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_a_part_is_that_part_of_the_whole(write_gguf: Callable[..., Any], data: st.DataObject) -> None:
    path, expected = write_gguf(kind=GGMLQuantizationType.Q8_0)
    tensors = sorted(open_gguf(path).tensors({}), key=lambda t: t.name)
    tensor = data.draw(st.sampled_from(tensors))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in tensor.shape]
    take = [Span(start, stop) for start, stop in bounds]
    found = tensor.read(take)
    assert found.dtype == expected[tensor.name].dtype
    assert torch.equal(found, part_of(expected[tensor.name], take))


def test_only_the_blocks_that_are_asked_for_are_unpacked(
    write_gguf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_gguf(kind=GGMLQuantizationType.Q8_0)
    down = next(t for t in open_gguf(path).tensors({}) if t.name.endswith("1.mlp.down_proj.weight"))
    unpacked_bytes = []

    def counting(data: Any, kind: GGMLQuantizationType) -> Any:
        unpacked_bytes.append(data.size)
        return gguf.quants.dequantize(data, kind)

    monkeypatch.setattr("kvspan.loading.gguf.dequantize", counting)
    down.read([Span(10, 20), Span(40, 70)])  # 96 x 160, in blocks of 32: two blocks of each of ten rows
    assert sum(unpacked_bytes) == 10 * 2 * 34


def test_parts_that_are_unpacked_in_chunks_are_whole(
    write_gguf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = write_gguf(kind=GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("kvspan.loading.gguf._VALUES_AT_ONCE", 100)
    for tensor in open_gguf(path).tensors({}):
        assert torch.equal(whole(tensor), expected[tensor.name]), tensor.name


def test_rope_divisors_go_to_the_config_and_not_to_the_tensors(write_gguf: Callable[..., Any]) -> None:
    divisors = [1.0] * 8 + [1.5, 2.0] + [8.0] * 6
    path, expected = write_gguf(divisors=divisors)
    checkpoint = open_gguf(path)
    assert {tensor.name for tensor in checkpoint.tensors({})} == expected.keys()
    rope = parse_model_config(checkpoint.raw_config, where="test").rope
    assert (rope.kind, rope.divisors, rope.theta) == ("divisors", tuple(divisors), 5000.0)


def linear_rope(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def test_linear_rope_scaling(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(metadata=linear_rope)
    rope = parse_model_config(open_gguf(path).raw_config, where="test").rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_divisors_beside_linear_scaling_are_refused(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(metadata=linear_rope, divisors=[1.0] * 16)
    with pytest.raises(ModelError, match=r'"linear" beside rope_freqs.weight'):
        open_gguf(path)


def test_divisors_for_another_head_are_refused(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(divisors=[1.0] * 15)
    with pytest.raises(ModelError, match=r"has shape \[15\], and a head's 32 elements have 16 freq"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            'unknown rope scaling type "yarn"',
        ),
        (lambda w: w.add_rope_dimension_count(8), "rotary embedding of 8 of a head's 32 elements"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts.*--merge"),
    ],
    ids=["yarn", "partial-rotary", "split"],
)
def test_what_is_not_there_is_refused_by_name(
    write_gguf: Callable[..., Any], metadata: Callable[[GGUFWriter], None], sentence: str
) -> None:
    path, _ = write_gguf(metadata=metadata)
    with pytest.raises(ModelError, match=sentence):
        open_gguf(path)


def test_unknown_architecture(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf("gemma3")
    with pytest.raises(ModelError, match=r'unknown architecture "gemma3" .has llama, qwen2, qwen3'):
        open_gguf(path)


def test_a_kind_that_cannot_be_unpacked_is_named(write_gguf: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "i8.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", torch.ones(4, 32, dtype=torch.int8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"token_embd.weight is of the quantisation type I8"):
        open_gguf(path)


def test_a_kind_without_a_name_is_refused_by_number(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(kind=GGMLQuantizationType.Q8_0)
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (GGMLQuantizationType.Q8_0,)
    struct.pack_into("<I", data, at, 999)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"token_embd.weight is of the unknown quantisation type 999"):
        open_gguf(path)


def test_a_tensor_without_a_hugging_face_name_keeps_its_own(
    write_gguf: Callable[..., Any], config: Callable[..., dict[str, Any]]
) -> None:
    path, _ = write_gguf()
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    assert "blk.1.ffn_xx.weight" in {tensor.name for tensor in open_gguf(path).tensors({})}


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 100, 300, 1000, -1])
def test_a_file_that_is_cut_off_is_refused(write_gguf: Callable[..., Any], keep: int) -> None:
    path, _ = write_gguf()
    cut = path.read_bytes()[:keep]
    path.write_bytes(cut)
    with pytest.raises(ModelError, match=path.name):
        read_gguf(path)


def test_the_last_byte_cut_off_is_told_in_bytes(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"ends at byte {size}, and the file has {size - 1} bytes"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        (b"version https://git-lfs", "is no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1, or big-endian"),
        (b"GGUF" + struct.pack(">I", 3), "or big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "broken or cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"key", "broken or cut off"),
        (b"GGUF" + struct.pack("<IQQQ3sI", 3, 0, 1, 3, b"key", 77), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 4, 2**62), "broken or cut off"),
    ],
    ids=["other", "old", "big-endian", "many-keys", "long-key", "unknown-type", "long-array"],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, begin: bytes, sentence: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(begin)
    with pytest.raises(ModelError, match=sentence):
        read_gguf(path)


texts = st.text(max_size=8)
metadata_values = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6).map("x.".__add__),
    st.one_of(
        texts,
        st.booleans(),
        st.integers(-(2**31), 2**31 - 1),
        st.floats(allow_nan=False, width=32),
        st.lists(texts, min_size=1, max_size=4),
        st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4),
    ),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(values=metadata_values, alignment=st.sampled_from([8, 32, 64]))
def test_reads_what_the_library_reads(tmp_path: Path, values: dict[str, Any], alignment: int) -> None:
    path = tmp_path / "twin.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for key, value in values.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tensors = {f"t{i}": torch.arange(3.0 * (i + 1)).reshape(3, i + 1).numpy() for i in range(3)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    own_fields = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if k not in own_fields}
    assert values.items() <= ours.metadata.items()
    assert [(t.name, t.blocks.tobytes()) for t in ours.tensors] == [
        (t.name, t.data.tobytes()) for t in theirs.tensors
    ]
