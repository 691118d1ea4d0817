"""Tokens -> text, one token at a time. Knows a decoder. Knows no stop strings and no requests."""

from collections.abc import Sequence
from typing import Protocol

UNSURE = "\ufffd"
"""What decoders write for bytes that are not a character: not one yet, or not one at all."""

MAX_UNSURE_TOKENS = 16
"""Tokens to wait for text. A character has 4 bytes at the most, so none takes this long."""

CONTEXT_TOKENS = 8
"""Tokens kept before the ones to decode when a window begins at no known border of a character."""

MAX_UNSURE_CHARACTERS = 3
"""Replacement characters at the end of a text that its next byte may still change: those of the up to
three bytes of an unfinished character."""


class Decoder(Protocol):
    """Whatever turns tokens into text, e.g. a `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`, with U+FFFD for bytes that are no character.

        Args:
            ids: the tokens.
            skip_special_tokens: leave special tokens out.
        """
        ...


class Detokenizer:
    """Decodes an output as it grows.

    Joined, the pieces are what the decoder makes of all tokens at once. Each token costs the decoding of
    a window of a few, not of all that came before:

        tokens   .. a b | c d | e f          a, b: their text is out and nobody needs them
                        |-----|              context: their text is out; e needs a neighbour on its
                        |-----------|        left, or a decoder takes it for the first word and
                            window           drops its leading space

    The window moves on whenever it lets text through. U+FFFD at its end is held back, since it may be
    half a character; it is let through when something follows it that makes no sense of it.

    Args:
        decoder: made for the model's tokenizer.
        skip_special_tokens: leave special tokens out of the text.
        prompt_ids: tokens before the output. With them a first word keeps its leading space, and a
            character that the prompt began is completed.
    """

    def __init__(
        self, decoder: Decoder, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_context = len(self._window)
        self._text = self._decode(self._window)  # of the window
        # A context cut inside a character may be unsure throughout; it is the prompt's, so all of it
        # counts as said.
        whole = self._text if self._text.startswith(UNSURE) else self._text.rstrip(UNSURE)
        self._num_said = len(whole)  # characters of `_text` that are out

    def push(self, token_id: int) -> str:
        """Takes the next token.

        Returns:
            The text that is sure by now and was not before; often "" inside a character.
        """
        text = self._decode([*self._window, token_id])
        if self._says_nothing(token_id, text):
            return ""
        self._window.append(token_id)
        self._text = text
        num_unsure = len(text) - len(text.rstrip(UNSURE))
        gave_up = len(self._window) - self._num_context > MAX_UNSURE_TOKENS
        if gave_up:
            num_unsure = min(num_unsure, MAX_UNSURE_CHARACTERS)
        piece = self._say(len(text) - num_unsure)
        if gave_up:
            self._forget(len(self._window) - CONTEXT_TOKENS, num_unsure)
        elif piece:
            self._forget(self._num_context, num_unsure)
        return piece

    def flush(self) -> str:
        """The text still held back: no token follows, so what is half a character stays one."""
        return self._say(len(self._text))

    def _says_nothing(self, token_id: int, text: str) -> bool:
        """Whether a token is one that is skipped, and would only make the window longer.

        The first tokens are kept: a space before the first word, which decoders drop, looks the same.
        """
        return text == self._text and self._num_said > 0 and not self._decode([token_id])

    def _say(self, until: int) -> str:
        """Counts the window's text up to `until` as said, and gives what of it was not before."""
        piece = self._text[self._num_said : until]
        self._num_said = max(self._num_said, until)
        return piece

    def _forget(self, num_tokens: int, num_unsure: int) -> None:
        """Drops tokens from the window's beginning, and makes the rest the context."""
        del self._window[:num_tokens]
        self._num_context = len(self._window)
        self._text = self._decode(self._window)
        self._num_said = max(len(self._text) - num_unsure, 0)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)
