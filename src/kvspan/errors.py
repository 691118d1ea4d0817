"""What can go wrong, as types. Every message is a sentence with the numbers and the way out.

    KvspanError
    ├── ConfigError (ValueError)     what was asked cannot run: flags, prompts' limits, budgets
    │   └── LayoutError              ranks, heads, blocks and interleave do not fit together
    ├── ModelError (ValueError)      a checkpoint, config or tokenizer is missing, broken or unknown
    ├── RequestError (ValueError)    one request is refused; all others go on
    │   └── LengthError              its prompt is longer than any may be
    ├── OutputError (RuntimeError)   one request cannot be finished; all others go on
    └── EngineDeadError (RuntimeError)  a rank died or hung; every running request ends with it
        └── LateError                it may have worked on: --step-timeout has passed

Knows nothing else of kvspan, so everything may import it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class KvspanError(Exception):
    """Anything that kvspan raises on purpose."""


class ConfigError(KvspanError, ValueError):
    """What was asked for cannot run; nothing has been started."""


class LayoutError(ConfigError):
    """Ranks, heads, blocks and interleave do not fit together.

    Args:
        sentence: what does not fit, with the numbers and the flags' names.
        reason: a stable one-word name of the rule that was broken, for tables and tests.
        fits: the nearest layouts that do, as the flags that ask for them.
    """

    def __init__(self, sentence: str, *, reason: str, fits: Sequence[str] = ()) -> None:
        listed = f" Layouts that fit: {'; '.join(fits)}." if fits else ""
        super().__init__(sentence + listed)
        self.reason = reason
        self.fits = tuple(fits)


class ModelError(KvspanError, ValueError):
    """A checkpoint, a config or a tokenizer is missing, broken or of an unknown kind."""


class RequestError(KvspanError, ValueError):
    """One request is refused; others are untouched.

    Args:
        sentence: why, and the way out.
        param: the field that is to blame, e.g. `messages[1].role`; None = no single one.
    """

    def __init__(self, sentence: str, *, param: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param


class LengthError(RequestError):
    """A prompt is longer than any may be."""


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Lets refusals from inside blame this field, unless they blame one themselves."""
    try:
        yield
    except RequestError as error:
        error.param = error.param or param
        raise


class OutputError(KvspanError, RuntimeError):
    """One request cannot be finished, and the same again would end the same; others are untouched."""


class EngineDeadError(KvspanError, RuntimeError):
    """A rank died or hung. The engine has stopped and ended all its ranks."""


class LateError(EngineDeadError):
    """Ranks that nobody has stopped have not answered within `--step-timeout`: it may be too short."""


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, for a sentence that names it: without number and path."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split()).rstrip(".")
