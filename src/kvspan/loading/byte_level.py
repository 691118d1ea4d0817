"""The letters that byte-level BPE (GPT-2) writes bytes with. Knows no tokenizer."""


def _byte_letters() -> dict[int, str]:
    """Byte -> letter: what can be printed is itself, the rest U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


LETTER_OF_BYTE = _byte_letters()
BYTE_OF_LETTER = {letter: byte for byte, letter in LETTER_OF_BYTE.items()}


def as_letters(token: bytes) -> str:
    """A token as a vocabulary of byte-level BPE spells it."""
    return "".join(LETTER_OF_BYTE[byte] for byte in token)
