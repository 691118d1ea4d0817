"""Text to tokens and back, and conversations to text. Knows no weights and no requests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvspan.config.model import token_ids
from kvspan.errors import ModelError
from kvspan.loading.byte_level import BYTE_OF_LETTER
from kvspan.loading.chat_template import DEFAULT, ChatTemplate
from kvspan.loading.gguf_file import read_gguf
from kvspan.loading.gguf_tokenizer import (
    adds_bos,
    build_tokenizer,
    end_token_ids,
    has_tokenizer,
)
from kvspan.loading.hf_files import read_optional_json, read_raw_config
from kvspan.loading.template_reading import Reading
from kvspan.loading.tiktoken_files import FILE_NAME as TIKTOKEN_FILE
from kvspan.loading.tiktoken_files import build_tokenizer as build_tiktoken

_TOKEN_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer, besides the tokenizer itself.

    Args:
        where: the file or directory, for errors.
        special_tokens: role -> token, e.g. `bos_token` -> `<s>`.
        add_bos: whether texts begin with BOS; None = as the tokenizer does by itself.
        eos_token_ids: tokens that end a text or a turn.
        chat_templates: name -> Jinja source; empty if there is none.
    """

    where: str
    special_tokens: Mapping[str, str]
    add_bos: bool | None
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]


class Tokenizer:
    """A model's tokenizer with its special tokens and its chat template.

    Args:
        core: the tokenizer proper.
        files: what the checkpoint says beside it.

    Raises:
        ModelError: a chat template is no valid Jinja.
    """

    def __init__(self, core: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        self._core = core
        self._files = files
        bos, eos = (files.special_tokens.get(role) for role in ("bos_token", "eos_token"))
        self.bos_token_id = None if bos is None else core.token_to_id(bos)
        eos_id = None if eos is None else core.token_to_id(eos)
        self.eos_token_ids = tuple(dict.fromkeys((*token_ids(eos_id), *files.eos_token_ids)))
        by_itself = core.encode("").ids[:1] == [self.bos_token_id]
        wants_bos = by_itself if files.add_bos is None else files.add_bos
        self._opening = [self.bos_token_id] if wants_bos and self.bos_token_id is not None else []
        self._template = ChatTemplate(
            files.chat_templates, where=files.where, special_tokens=files.special_tokens
        )

    @property
    def vocab_size(self) -> int:
        """Tokens, special ones included. A model's embedding may have more rows."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written as text."""
        return bool(self._files.chat_templates)

    @property
    def chat_template_source(self) -> str:
        """The Jinja source, of all templates if there are several; empty if there is none."""
        return "\n".join(self._files.chat_templates.values())

    @property
    def chat_template_reading(self) -> Reading:
        """What the chat template shows the model, and in what shape; it is run to find out, once."""
        return self._template.reading

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Cuts text into tokens.

        Args:
            text: it may contain special tokens, spelled out.
            add_special_tokens: begin with BOS if the model wants it. A text that begins with it
                already, as chat templates write it, gets no second one.
        """
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        opening = self._opening if add_special_tokens and ids[:1] != self._opening else []
        return opening + ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Joins tokens to text. Bytes that are no character (yet) come out as U+FFFD.

        Args:
            ids: token ids; those without a token are left out.
            skip_special_tokens: leave special tokens out of the text.
        """
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The tokenizer proper, as a `tokenizer.json` has it."""
        return self._core.to_str()

    def id_to_token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it (a space may be `Ġ`), or None if there is none."""
        return self._core.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None if there is none."""
        return self._core.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character; none if unknown."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added or not self._is_byte_level:
            return _plain_bytes(token, is_added=token_id in self._added)
        return bytes(BYTE_OF_LETTER[letter] for letter in token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Writes a conversation as the model was taught to read it.

        Args:
            messages: each with a `role` and mostly a `content`.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_kwargs: more that the template may look at, e.g. `tools`, `enable_thinking`.

        Returns:
            Text with special tokens spelled out, for `encode`.

        Raises:
            ModelError: the model has no chat template.
            RequestError: the template refuses the messages.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"{self._files.where} has no chat template: give one with --chat-template, or send "
                "a prompt instead of messages."
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=template_kwargs or {}
        )

    def with_chat_template(self, source: str, *, where: str = "chat_template") -> "Tokenizer":
        """The same tokenizer with another chat template.

        Args:
            source: Jinja.
            where: it came from, for errors.

        Raises:
            ModelError: it is no valid Jinja.
        """
        files = replace(self._files, chat_templates={DEFAULT: source}, where=where)
        return Tokenizer(self._core, files)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._core.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._core.to_str())["decoder"])


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a model's tokenizer.

    Args:
        path: what `resolve.locate` found: a Hugging Face directory or a `.gguf` file.

    Raises:
        ModelError: there is none, or it is broken or of an unknown kind.
    """
    if (tokenizer := find_tokenizer(path)) is None:
        raise ModelError(
            f"{path} has no tokenizer (a tokenizer.json, a {TIKTOKEN_FILE}, or one inside a GGUF file): "
            "it can only be given token ids, not text."
        )
    return tokenizer


def find_tokenizer(path: Path) -> Tokenizer | None:
    """Loads a model's tokenizer, or returns None when it has none; see `load_tokenizer`."""
    return _from_gguf(path) if path.suffix == ".gguf" else _from_directory(path)


def _from_gguf(path: Path) -> Tokenizer | None:
    metadata = read_gguf(path).metadata
    if not has_tokenizer(metadata):
        return None
    core = build_tokenizer(metadata, where=str(path))
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_id") for role in ("bos_token", "eos_token")}
    ids |= {"pad_token": metadata.get("tokenizer.ggml.padding_token_id")}
    spelled = {role: core.id_to_token(i) for role, i in ids.items() if i is not None}
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(key).removeprefix(".") or DEFAULT: source
        for name, source in metadata.items()
        if name == key or name.startswith(f"{key}.")
    }
    return Tokenizer(
        core,
        TokenizerFiles(
            where=str(path),
            special_tokens={role: token for role, token in spelled.items() if token is not None},
            add_bos=adds_bos(metadata),
            eos_token_ids=tuple(end_token_ids(metadata)),
            chat_templates=templates,
        ),
    )


def _from_directory(directory: Path) -> Tokenizer | None:
    config = read_optional_json(directory / "tokenizer_config.json")
    if (core := _core_of(directory, config)) is None:
        return None
    return Tokenizer(
        core,
        TokenizerFiles(
            where=str(directory),
            special_tokens={r: _spelled(config[r]) for r in _TOKEN_ROLES if config.get(r) is not None},
            add_bos=config.get("add_bos_token"),
            eos_token_ids=token_ids(read_raw_config(directory).get("eos_token_id")),
            chat_templates=_read_chat_templates(directory, config),
        ),
    )


def _core_of(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """The tokenizer proper: a `tokenizer.json`, or else one made of a `tiktoken.model`."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return build_tiktoken(directory, config) if (directory / TIKTOKEN_FILE).exists() else None
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"{path} is no tokenizer: {error}.") from error
    core.no_truncation()
    core.no_padding()
    return core


def _spelled(token: str | Mapping[str, Any]) -> str:
    """A token, which configs write plainly or as a mapping with its traits."""
    return token if isinstance(token, str) else str(token["content"])


def _read_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. A file of its own goes before what `tokenizer_config.json` has."""
    if (path := directory / "chat_template.jinja").exists():
        return {DEFAULT: path.read_text(encoding="utf-8")}
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    return {entry["name"]: entry["template"] for entry in value}


def _plain_bytes(token: str, *, is_added: bool) -> bytes:
    """Bytes of a token that is spelled as it is, or in SentencePiece's way."""
    if is_added:
        return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()  # SentencePiece writes spaces so
