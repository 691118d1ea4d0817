"""tiktoken is the oracle: vocabularies that are trained here give the same ids."""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from kvspan.errors import ModelError
from kvspan.loading.tokenizer import Tokenizer, load_tokenizer
from kvspan.testing.checkpoints import write_tokenizer
from kvspan.testing.tiny import tiny_kimi

CORPUS = (
    "the quick brown fox jumps over the lazy dog. The other THE then they're we'll it's "
    "你好世界 今天天气很好\uff0c我们去公园。 你好吗 日本語のテキスト 한국어 Привет мир "
    "1234567890 2024-01-02 3.14159  \n\n\t  def f(x):\n    return x\n 🙂🙂🚀 👩‍👩‍👧 aaaa ababab "
) * 3
KIMI_CUT = "|".join(  # as `tokenization_kimi.py` of moonshotai/Kimi-K2-Instruct has it
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
CL100K_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The names are Kimi's; the vocabulary comes before them.
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 7: "<|im_middle|>"}


def train(text: str, num_merges: int) -> dict[bytes, int]:
    """Ranks of a byte-pair vocabulary: the most frequent neighbours of words merge, again and again."""
    ranks = {bytes([b]): b for b in range(256)}
    words = Counter(tuple(bytes([b]) for b in f" {word}".encode()) for word in text.split())
    for _ in range(num_merges):
        pairs = Counter[bytes]()
        for word, count in words.items():
            for a, b in pairwise(word):
                pairs[a + b] += count
        new = next((token for token, _ in pairs.most_common() if token not in ranks), None)
        if new is None:
            break
        ranks[new] = len(ranks)
        words = Counter({_merged(word, ranks): count for word, count in words.items()})
    return ranks


def _merged(word: tuple[bytes, ...], ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """As tiktoken does it, written out: the leftmost pair of lowest rank, until there is none."""
    parts = list(word)
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return tuple(parts)
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def write(directory: Path, ranks: dict[bytes, int], *, kimi: bool = True) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(ranks) + i): {"content": name, "special": True} for i, name in NAMED.items()}
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    if kimi:
        config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(tiny_kimi()))


def oracle(ranks: dict[bytes, int], *, kimi: bool = True) -> tiktoken.Encoding:
    first = len(ranks)
    special = {name: first + i for i, name in NAMED.items()}
    if kimi:
        unnamed = [first + i for i in range(256) if i not in NAMED]
        special |= {f"<|reserved_token_{i}|>": i for i in unnamed}
    pattern = KIMI_CUT if kimi else CL100K_CUT
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return train(CORPUS, 300)


@pytest.fixture(scope="module", params=["kimi", "default"])
def both(
    request: pytest.FixtureRequest, ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tiktoken.Encoding]:
    directory, kimi = tmp_path_factory.mktemp(request.param), request.param == "kimi"
    write(directory, ranks, kimi=kimi)
    return load_tokenizer(directory), oracle(ranks, kimi=kimi)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The quick brown fox they're WE'LL IT'S o'clock",
        "你好世界今天天气很好mixed中文and英文ABC你好",
        "日本語のテキスト、한국어 Привет",
        "  two  spaces   \n\n \t tab\r\n  end   ",
        "1 12 123 1234 1234567 3.14 ½ ٣٤",
        "🙂🙂🚀 👩‍👩‍👧 🇩🇪 e\u0301 ﷽",
        "def f(x):\n    return x  # done\n",
        "<|im_user|>user<|im_middle|>Hello<|im_end|>[EOS]<|not_special|>",
        "aaaaaaa abababab aabaab",
    ],
)
def test_the_same_ids_as_tiktoken(both: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert b"".join(ours.token_bytes(i) for i in ids) == text.encode()


@given(text=st.text(max_size=60))
def test_any_text_has_the_same_ids(both: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text)
    assert ids == theirs.encode(text, allowed_special="all")
    assert ours.decode(ids, skip_special_tokens=False) == text


@given(text=st.text("ab 你好1'sT\n", max_size=80))
def test_texts_that_merge_much(both: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text, allowed_special="all")


@given(
    words=st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=8), text=st.text("ab")
)
def test_vocabularies_of_repetitions(words: list[str], text: str, tmp_path_factory: object) -> None:
    """Tokens that can be made of others in many ways, and overlap with themselves."""
    small = train(" ".join(words), 40)
    directory = tmp_path_factory.mktemp("small")  # type: ignore[attr-defined]
    write(directory, small)
    assert load_tokenizer(directory).encode(text) == oracle(small).encode(text)


def test_special_tokens_and_reserved_ids(ranks: dict[bytes, int], tmp_path: Path) -> None:
    write(tmp_path, ranks)
    tokenizer, first = load_tokenizer(tmp_path), len(ranks)
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.bos_token_id == first
    assert first + 1 in tokenizer.eos_token_ids
    assert tokenizer.id_to_token(first + 5) == f"<|reserved_token_{first + 5}|>"
    ids = tokenizer.encode("hi<|im_end|>")
    assert ids[-1] == first + 2
    assert tokenizer.decode(ids) == "hi", "special tokens are no text, and no BOS came before"


def test_a_tokenizer_json_goes_first(ranks: dict[bytes, int], tmp_path: Path) -> None:
    write(tmp_path, ranks)
    assert load_tokenizer(tmp_path).vocab_size == len(ranks) + 256
    write_tokenizer(tmp_path, vocab_size=203)
    assert load_tokenizer(tmp_path).vocab_size == 203


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"YQ== 0\nYg==\n", "line 2: no token in base64 and its rank."),
        (b"Y! 0\n", "line 1: no token in base64 and its rank."),
        (b"YQ== x\n", "line 1: no token in base64 and its rank."),
        (b"YQ== 0\n\nYg== 1\n", "254 of the 256 bytes have no token."),
    ],
)
def test_a_broken_file_is_named(content: bytes, sentence: str, tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).endswith(sentence)
    assert "tiktoken.model" in str(caught.value)
