"""Incremental text against the whole decode, with real decoders: byte-level BPE and SentencePiece's."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvspan.sampling.detokenize import MAX_UNSURE_TOKENS, UNSURE, Detokenizer

MERGED = [
    "the",
    " the",
    " fox",
    "日本",
    "\u65e5",
    "😀",
    "é",
    "e\u0301",
    " \U0001f468\u200d\U0001f469",
    "\n\n",
]


def byte_level() -> Tokenizer:
    """A byte-level tokenizer: a token for each byte, some for words, and two that cut characters."""
    alphabet = bytes_to_alphabet()
    vocab = {letter: byte for byte, letter in enumerate(alphabet)}
    cut = ["a\u010f".encode()[:2], "\U0001f600".encode()[1:]]  # a + half of ď; 😀 but its first byte
    for text in [*(word.encode() for word in MERGED), *cut]:
        vocab.setdefault("".join(alphabet[b] for b in text), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<|im|>", special=True)]
    )
    return tokenizer


def bytes_to_alphabet() -> list[str]:
    """The letter that stands for each byte, found by asking the library's own pre-tokenizer."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    found = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
    assert set(found) == letters
    return found


def sentencepiece() -> Tokenizer:
    """A decoder like Llama 2's: the first space goes, and bytes are tokens of their own."""
    words = ["▁the", "▁fox", "▁", "s", "日", "▁a", "▁▁"]
    names = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BYTES = byte_level()
PIECES = sentencepiece()
END = BYTES.token_to_id("<|end|>")


class Counting:
    """A decoder that counts the tokens it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens))


def pieces_of(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = ()
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def token(word: str) -> int:
    """The byte-level token of a whole word."""
    alphabet = bytes_to_alphabet()
    return int(BYTES.token_to_id("".join(alphabet[b] for b in word.encode())))


def test_half_a_character_waits() -> None:
    assert pieces_of(BYTES, [0xC4, 0x8F]) == ["", "ď", ""]


def test_an_emoji_over_three_tokens() -> None:
    ids = [token(" fox"), 0xF0, 0x9F, 0x98, 0x80, token("the")]
    assert pieces_of(BYTES, ids) == [" fox", "", "", "", "😀", "the", ""]


def test_a_token_that_ends_inside_a_character_gives_what_is_whole() -> None:
    (half,) = (i for i in range(256, END) if BYTES.decode([i]) == f"a{UNSURE}")
    assert pieces_of(BYTES, [half, 0x8F]) == ["a", "ď", ""]


def test_invalid_bytes_come_out_once_they_cannot_be_valid() -> None:
    assert pieces_of(BYTES, [0xC4, 0x61]) == ["", f"{UNSURE}a", ""]
    assert pieces_of(BYTES, [0x61, 0xC4]) == ["a", "", UNSURE]


def test_special_tokens_are_left_out_or_kept() -> None:
    ids = [token("the"), END, token(" fox")]
    assert pieces_of(BYTES, ids) == ["the", "", " fox", ""]
    assert pieces_of(BYTES, ids, skip=False) == ["the", "<|end|>", " fox", ""]


def test_special_tokens_inside_a_character() -> None:
    ids = [0xF0, 0x9F, *[END] * 100, 0x98, 0x80]
    assert "".join(pieces_of(BYTES, [0x61, *ids])) == "a😀"


def sp(*names: str) -> list[int]:
    return [int(PIECES.token_to_id(name)) for name in names]


def test_a_leading_space_goes_only_at_the_beginning() -> None:
    assert pieces_of(PIECES, sp("▁the", "▁fox", "s", "▁a")) == ["the", " fox", "s", " a", ""]
    assert pieces_of(PIECES, sp("▁the", "</s>", "▁fox")) == ["the", "", " fox", ""]
    assert pieces_of(PIECES, sp("▁", "▁fox")) == ["", " fox", ""]


def test_after_a_prompt_the_first_space_stays() -> None:
    assert pieces_of(PIECES, sp("▁fox"), prompt=sp("▁the")) == [" fox", ""]
    assert pieces_of(PIECES, sp("▁fox"), prompt=sp("▁the") * 50) == [" fox", ""]


def test_a_character_that_the_prompt_began() -> None:
    assert pieces_of(BYTES, [0x8F], prompt=[0x61, 0xC4]) == ["ď", ""]


def test_a_prompt_cut_inside_its_characters_does_not_leak() -> None:
    prompt = [PIECES.token_to_id(f"<0x{b:02X}>") for b in "日本語日本語".encode()]
    assert pieces_of(PIECES, sp("▁fox"), prompt=prompt) == [" fox", ""]


def test_bytes_of_neighbouring_characters_are_not_mistaken() -> None:
    ids = [PIECES.token_to_id(f"<0x{b:02X}>") for b in "日本é😀".encode()]
    pieces = pieces_of(PIECES, ids)
    assert [p for p in pieces if p] == ["日", "本", "é", "😀"]


byte_ids = st.integers(0, BYTES.get_vocab_size() - 1)
text_ids = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from("é\u0301😀👩\u200d🚀\ufffd日\n ")
    ),
    max_size=12,
).map(lambda text: list(text.encode()))
junk_ids = st.lists(st.sampled_from([0x80, 0xC4, 0xE4, 0xF0, 0x9F, 0xFF, 0xED, 0xA0]), max_size=30)
outputs = st.lists(
    st.one_of(text_ids, text_ids, junk_ids, st.lists(byte_ids, max_size=8), st.just([END])), max_size=6
).map(lambda parts: [i for part in parts for i in part])


@settings(max_examples=300, deadline=None)
@given(ids=outputs, skip=st.booleans())
@example(ids=[0xF0, 0x9F, 0x98] * 20 + [0x80], skip=True)
@example(ids=[*"\ufffd".encode()] * 40, skip=True)
@example(ids=[END] * 40 + [0xC4, 0x8F], skip=True)
@example(ids=[0x80, *[END] * 40, 0xC4, 0x8F], skip=False)
def test_joined_pieces_are_the_whole_decode(ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(BYTES, ids, skip=skip)) == BYTES.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(ids=outputs)
def test_what_is_out_is_never_taken_back(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES, skip_special_tokens=True)
    out = ""
    whole = BYTES.decode(ids, True)
    for i in ids:
        out += detokenizer.push(i)
        assert whole.startswith(out)


@settings(max_examples=100, deadline=None)
@given(ids=outputs)
def test_valid_text_waits_for_no_more_than_its_character(ids: list[int]) -> None:
    text = BYTES.decode(ids, True).replace(UNSURE, "")
    detokenizer = Detokenizer(BYTES, skip_special_tokens=True)
    out = ""
    for n, byte in enumerate(text.encode(), start=1):
        out += detokenizer.push(byte)
        assert out == text.encode()[:n].decode(errors="ignore")


words = st.sampled_from(["▁the", "▁fox", "▁", "s", "日", "▁a", "▁▁", "</s>"]).map(lambda w: sp(w))
runs = st.text("日é😀a", min_size=1, max_size=4).map(lambda t: sp(*(f"<0x{b:02X}>" for b in t.encode())))


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.one_of(words, runs), max_size=12), skip=st.booleans())
@example(parts=[sp("</s>")] * 30 + [sp("▁the"), sp("▁fox")], skip=True)
def test_joined_pieces_are_the_whole_decode_of_sentencepiece(parts: list[list[int]], skip: bool) -> None:
    ids = [i for part in parts for i in part]
    assert "".join(pieces_of(PIECES, ids, skip=skip)) == PIECES.decode(ids, skip)


@pytest.mark.parametrize(
    "ids",
    [
        [token(" fox")] * 2000,
        [0xFF] * 2000,
        [*"\ufffd".encode()] * 700,
        [END] * 2000,
        [0x61] + [0xF0, END] * 1000,
        [*"😀".encode()] * 500,
    ],
    ids=["words", "invalid", "replacement characters", "special", "both", "emoji"],
)
def test_a_token_costs_the_decoding_of_a_few(ids: list[int]) -> None:
    decoder = Counting(BYTES)
    detokenizer = Detokenizer(decoder)
    for i in ids:
        detokenizer.push(i)
    assert decoder.num_decoded <= 2 * (MAX_UNSURE_TOKENS + 10) * len(ids)
