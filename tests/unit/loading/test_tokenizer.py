import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from kvspan.errors import ModelError
from kvspan.loading.gguf import open_gguf
from kvspan.loading.resolve import locate
from kvspan.loading.tokenizer import Tokenizer, find_tokenizer, load_tokenizer

Config = Callable[..., dict[str, Any]]
BOS, EOS, TURN = "<s>", "</s>", "<|turn|>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [BOS, EOS, TURN, *LETTERS]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "I'LL say it's 12345 + 67.89 = 12,412.89; 2025-01-31",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x ** 2}  # why?\r\n\n\n",
    "naïve café — Zürich, Łódź, Ελλάδα, Москва, 日本語のテキスト, العربية, हिन्दी",
    "e\u0301 is not \u00e9",
    "👩‍👩‍👧‍👦 🇨🇭 👍🏽 \U0001f600",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_end|> <|im_end |>",
    "\x00\x07\ufffd\u200b\ufeff",
    "١٢٣ Ⅷ ½ ²",
]


def byte_tokenizer(*, bos_by_itself: bool) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(VOCABULARY)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, TURN)])
    if bos_by_itself:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    return core


def write_directory(
    directory: Path,
    raw_config: dict[str, Any],
    *,
    bos_by_itself: bool = False,
    core: tokenizers.Tokenizer | None = None,
    **tokenizer_config: Any,
) -> Path:
    (directory / "config.json").write_text(json.dumps(raw_config))
    (core or byte_tokenizer(bos_by_itself=bos_by_itself)).save(str(directory / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": {"content": EOS, "special": True}} | tokenizer_config
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


@pytest.mark.parametrize(
    ("bos_by_itself", "add_bos_token", "wants"),
    [
        (True, None, True),
        (False, None, False),
        (True, False, False),
        (False, True, True),
        (True, True, True),
    ],
)
def test_exactly_one_bos_if_the_model_wants_one(
    tmp_path: Path, config: Config, bos_by_itself: bool, add_bos_token: bool | None, wants: bool
) -> None:
    write_directory(tmp_path, config(), bos_by_itself=bos_by_itself, add_bos_token=add_bos_token)
    tokenizer = load_tokenizer(tmp_path)
    plain = [VOCABULARY.index("a")]
    assert tokenizer.encode("a") == [0] * wants + plain
    assert tokenizer.encode("") == [0] * wants
    assert tokenizer.encode("a", add_special_tokens=False) == plain
    assert tokenizer.encode(f"{BOS}a") == [0, *plain]  # as a chat template writes it
    assert tokenizer.encode(f"{BOS}{BOS}a") == [0, 0, *plain]  # as somebody asked for it


def test_special_tokens_and_ends(tmp_path: Path, config: Config) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    tokenizer = load_tokenizer(write_directory(tmp_path, config(eos_token_id=1)))
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (1, 2)
    assert tokenizer.vocab_size == len(VOCABULARY)
    ids = tokenizer.encode(f"{BOS}a{TURN}b{EOS}")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}a{TURN}b{EOS}"
    assert tokenizer.id_to_token(2) == TURN
    assert tokenizer.token_to_id(TURN) == 2
    assert tokenizer.id_to_token(10_000) is None
    assert tokenizer.decode([*ids, 10_000]) == "ab"


def test_cuts_and_pads_of_the_file_do_not_matter(tmp_path: Path, config: Config) -> None:
    core = byte_tokenizer(bos_by_itself=False)
    core.enable_truncation(2)
    core.enable_padding(length=9)
    tokenizer = load_tokenizer(write_directory(tmp_path, config(), core=core))
    assert len(tokenizer.encode("abcd")) == 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(text=st.text())
def test_bytes_of_tokens_make_up_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()
    assert byte_level.decode(ids, skip_special_tokens=False) == text


@pytest.fixture
def byte_level(tmp_path: Path, config: Config) -> Tokenizer:
    return load_tokenizer(write_directory(tmp_path, config()))


def test_bytes_of_special_and_unknown_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(2) == TURN.encode()
    assert byte_level.token_bytes(10_000) == b""


def test_bytes_of_sentencepiece_tokens(tmp_path: Path, config: Config) -> None:
    vocabulary = [BOS, EOS, "\u2581the", "<0xE2>", "a"]
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[]))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    core.add_tokens([AddedToken(BOS, special=True)])
    tokenizer = load_tokenizer(write_directory(tmp_path, config(), core=core))
    assert [tokenizer.token_bytes(i) for i in range(5)] == [b"<s>", b"</s>", b" the", b"\xe2", b"a"]


def test_without_a_tokenizer_there_are_still_token_ids(
    tmp_path: Path, config: Config, write_gguf: Callable[..., Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    path, _ = write_gguf()
    for place in (tmp_path, path):
        assert find_tokenizer(place) is None
        with pytest.raises(ModelError, match="it can only be given token ids"):
            load_tokenizer(place)


def test_a_broken_tokenizer_is_named(tmp_path: Path, config: Config) -> None:
    write_directory(tmp_path, config())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)


def gguf_tokenizer(
    pre: str | None, merges: list[str], *, model: str = "gpt2", **more: Any
) -> Callable[[GGUFWriter], None]:
    """Metadata of a byte-level tokenizer with a few merges; `</s>` ends and `<tool>` is the user's."""
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [BOS, EOS, "<tool>", *LETTERS, *merged, "whole"]

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 4] + [1] * (len(tokens) - 3))
        writer.add_token_merges(merges)
        for key, value in more.items():
            writer.add_key_value(f"tokenizer.{key.replace('__', '.')}", value, _value_type(value))

    return write


def _value_type(value: Any) -> Any:
    from gguf import GGUFValueType

    return GGUFValueType.get_type(value)


def spelled(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]


DIGITS = ["1 2", "12 3", "3 4", "123 4"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("gpt-2", "1234", ["1234"]),
        (None, "1234", ["1234"]),
        ("llama-bpe", "whole", ["whole"]),  # a token without merges that make it
        ("qwen2", "whole", ["w", "h", "o", "l", "e"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("llama-bpe", "I'LL", ["I", "'LL"]),  # whatever the case
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
        ("qwen2", "\n\n x", ["ĊĊ", "Ġ", "x"]),
        ("gpt-2", "\n\n x", ["Ċ", "Ċ", "Ġ", "x"]),
        ("qwen2", "a<tool>b", ["a", "<tool>", "b"]),
    ],
)
def test_pre_tokenizers_of_gguf_files(
    write_gguf: Callable[..., Any], pre: str | None, text: str, expected: list[str]
) -> None:
    merges = [*DIGITS, "L L", "' LL", "Ċ Ċ", "ĊĊ Ġ"]
    if pre == "gpt-2" and "\n" in text:
        merges = [*DIGITS, "Ċ Ġ"]
    path, _ = write_gguf(metadata=gguf_tokenizer(pre, merges))
    assert spelled(load_tokenizer(path), text) == expected


def test_only_control_tokens_are_left_out_of_text(write_gguf: Callable[..., Any]) -> None:
    path, _ = write_gguf(metadata=gguf_tokenizer("qwen2", DIGITS))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("<s>a<tool>b</s>")) == "a<tool>b"


@pytest.mark.parametrize(
    ("pre", "more", "wants"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"ggml__add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"ggml__add_bos_token": True}, True),
    ],
)
def test_bos_of_gguf_files(
    write_gguf: Callable[..., Any], config: Config, pre: str, more: dict[str, Any], wants: bool
) -> None:
    metadata = gguf_tokenizer(pre, DIGITS, **more)
    path, _ = write_gguf(raw_config=config(bos_token_id=0, eos_token_id=1), metadata=metadata)
    tokenizer = load_tokenizer(path)
    assert tokenizer.bos_token_id == 0
    assert (tokenizer.encode("a")[0] == 0) == wants


def test_both_ends_of_gguf_files(write_gguf: Callable[..., Any], config: Config) -> None:
    def metadata(writer: GGUFWriter) -> None:
        gguf_tokenizer("qwen2", DIGITS)(writer)
        writer.add_eot_token_id(2)

    path, _ = write_gguf(raw_config=config(eos_token_id=1), metadata=metadata)
    assert load_tokenizer(path).eos_token_ids == (1, 2)
    assert open_gguf(path).raw_config["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("pre", "model", "sentence"),
    [
        ("tekken", "gpt2", 'unknown pre-tokenizer "tekken" .has smollm, llama-bpe'),
        (
            "default",
            "llama",
            'a tokenizer of the kind "llama" .* use the model\'s Hugging Face directory',
        ),
    ],
)
def test_unknown_tokenizers_of_gguf_files(
    write_gguf: Callable[..., Any], pre: str, model: str, sentence: str
) -> None:
    path, _ = write_gguf(metadata=gguf_tokenizer(pre, DIGITS, model=model))
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(path)
    assert list(open_gguf(path).tensors({}))  # its weights can be read


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    """The packaged model's tokenizer."""
    return load_tokenizer(locate("smollm2-135m"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers makes of the packaged file."""
    import gguf
    from transformers import PreTrainedTokenizerFast

    fields = gguf.GGUFReader(locate("smollm2-135m")).fields
    said = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=tokens[1], eos_token=tokens[2], pad_token=tokens[2]
    )
    tokenizer.chat_template = said["tokenizer.chat_template"]
    directory = tmp_path_factory.mktemp("smollm2")
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.weights
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert b"".join(ours.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.weights
def test_the_directory_gives_the_same_tokenizer(ours: Tokenizer, theirs: Any) -> None:
    from_directory = load_tokenizer(Path(theirs.name_or_path))
    for text in TEXTS:
        assert from_directory.encode(text) == ours.encode(text)
    assert from_directory.eos_token_ids == ours.eos_token_ids == (2,)
    assert from_directory.bos_token_id == ours.bos_token_id == 1
    messages = [{"role": "user", "content": "Hi"}]
    assert from_directory.apply_chat_template(messages) == ours.apply_chat_template(messages)


@pytest.mark.weights
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_conversations_read_as_in_transformers(
    ours: Tokenizer, theirs: Any, system: list[dict[str, str]], prompt: bool
) -> None:
    messages = [
        *system,
        {"role": "user", "content": "<b>Hi</b> & 'bye'\n"},
        {"role": "assistant", "content": "Ho"},
    ]
    text = ours.apply_chat_template(messages, add_generation_prompt=prompt)
    options = {"add_generation_prompt": prompt, "tokenize": False}
    assert text == theirs.apply_chat_template(messages, **options)
    encoded = theirs.apply_chat_template(messages, add_generation_prompt=prompt)
    assert ours.encode(text) == encoded["input_ids"]
