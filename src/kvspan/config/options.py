"""An option: what the user may ask, as data. Knows no command line, no file and no option in particular.

A dataclass whose fields are made by `option()` or `required()` is a table of options; command lines,
files and keyword arguments are three ways to fill it, and all of them end in the same readers.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvspan.config.absent import refuse_unknown
from kvspan.config.sizes import parse_bytes, parse_count
from kvspan.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")


class OptionGroup(StrEnum):
    """Headings of `--help`."""

    MODEL = "Model"
    PARALLELISM = "Parallelism"
    CACHE = "KV cache"
    SCHEDULING = "Scheduling"
    RUNTIME = "Runtime"
    SERVER = "Server"
    LIMITS = "Limits"
    FAULTS = "Faults"
    HARDWARE = "Hardware"
    LOAD = "Load and goal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[T]):
    """What values an option takes.

    Args:
        metavar: stands for the value in `--help`.
        read: makes the value of whatever was given; a ValueError ends the sentence "--flag value ...".
        bare: what the flag means on the command line without a value; None = it needs one.
        switch: whether the flag takes no value, and has a `--no-` form.
    """

    metavar: str
    read: Callable[[object], T]
    bare: str | None = None
    switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing that can be asked.

    Args:
        kind: what values it takes.
        default: what it is when nobody says; None = `unsaid`, and MISSING = it must be said.
        help: a line for `--help`.
        group: where in `--help`.
        unsaid: what None means.
        short: one more spelling on the command line.
        aliases: further names.
        name: the name of the field: `--a-b-c` is `a_b_c`.
    """

    kind: Kind[Any]
    default: object
    help: str
    group: OptionGroup
    unsaid: str = "auto"
    short: str | None = None
    aliases: tuple[str, ...] = ()
    name: str = ""

    @property
    def flag(self) -> str:
        """`--a-b-c`."""
        return as_flag(self.name)

    @property
    def shown_default(self) -> str:
        """The default for `--help`."""
        if self.default is MISSING:
            return "none, it must be said"
        if self.default is None:
            return self.unsaid
        if self.kind.switch:
            return "on" if self.default else "off"
        return "none" if self.default in ("", ()) else str(self.default)

    def read(self, value: object) -> Any:
        """The value as kvspan keeps it; reading what was read changes nothing.

        Args:
            value: as the user gave it; None, and "auto" where that is the default, say nothing.

        Raises:
            ConfigError: it is not a value of this kind, or one that is not there yet.
        """
        if value is None or (self.default is None and value == "auto"):
            if self.default is MISSING:
                raise ConfigError(f"{self.flag} is missing: give {self.help}.")
            value = self.default
        if value is None:
            return None
        try:
            return self.kind.read(value)
        except ValueError as error:
            said = "" if self.kind.switch and value is True else f" {_shown(value)}"
            raise ConfigError(f"{self.flag}{said} {error}.") from None


def option(
    kind: Kind[T],
    default: D,
    help: str,
    group: OptionGroup,
    *,
    unsaid: str = "auto",
    short: str | None = None,
    aliases: tuple[str, ...] = (),
) -> T | D:
    """A field that need not be said; see `Option` for the arguments."""
    made = Option(
        kind=kind, default=default, help=help, group=group, unsaid=unsaid, short=short, aliases=aliases
    )
    value: T | D = field(default_factory=lambda: default, metadata={"option": made})
    return value


def required(kind: Kind[T], help: str, group: OptionGroup) -> T:
    """A field that must be said."""
    made = Option(kind=kind, default=MISSING, help=help, group=group)
    value: T = field(metadata={"option": made})
    return value


def options_of(table: type[Any]) -> tuple[Option, ...]:
    """The options of a dataclass, in order."""
    return tuple(replace(f.metadata["option"], name=f.name) for f in fields(table))


def canonical(values: Mapping[str, Any], options: Sequence[Option]) -> dict[str, Any]:
    """The same values under the names of the fields.

    Args:
        values: by name, with dashes or underscores, or by alias.
        options: what there is.

    Raises:
        ConfigError: a name is unknown, or two names of one option stand there.
    """
    names = {alias: o.name for o in options for alias in (o.name, *o.aliases)}
    found: dict[str, Any] = {}
    for spelling, value in values.items():
        name = names.get(str(spelling).replace("-", "_"))
        if name is None:
            raise refuse_unknown(as_flag(str(spelling)), [as_flag(known) for known in names])
        if name in found:
            raise ConfigError(f"{as_flag(name)} is said twice, by two of its names: leave one out.")
        found[name] = value
    return found


def as_flag(name: str) -> str:
    """`a_b_c` -> `--a-b-c`."""
    return "--" + name.strip("-").replace("_", "-")


def whole(minimum: int, maximum: int | None = None, *, multiple_of: int = 1) -> Kind[int]:
    """A whole number between two bounds."""
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    wanted = "a whole number " if multiple_of == 1 else f"a multiple of {multiple_of} "

    def read(value: object) -> int:
        number = _as_int(value)
        if number is None or number % multiple_of or not minimum <= number <= (maximum or math.inf):
            raise ValueError(f"is not {wanted}{bounds}")
        return number

    return Kind(metavar="N", read=read)


def seconds(minimum: float) -> Kind[float]:
    """A number of seconds, at least so many."""

    def read(value: object) -> float:
        number = _as_float(value)
        if not minimum <= number < math.inf:
            raise ValueError(f"is not a number of seconds of at least {minimum:g}")
        return number

    return Kind(metavar="SECONDS", read=read)


def only_one(absent: str) -> Kind[int]:
    """A size that can only be 1 as yet.

    Args:
        absent: what is not there, and what to use instead.
    """
    counts = whole(1)

    def read(value: object) -> int:
        if counts.read(value) > 1:
            raise ValueError(f"is refused: {absent}")
        return 1

    return Kind(metavar="N", read=read)


def choice(
    *names: str,
    aliases: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
    switch_names: tuple[str, str] | None = None,
) -> Kind[str]:
    """One of some words.

    Args:
        names: the words.
        aliases: other spellings of them.
        absent: words that others know, and why they are refused here.
        switch_names: words that False and True stand for; the flag alone then means True.
    """
    spellings = {name: name for name in names} | dict(aliases or {})
    also = f" (or {', '.join(aliases)})" if aliases else ""

    def read(value: object) -> str:
        if isinstance(value, bool) and switch_names is not None:
            return switch_names[value]
        word = value if isinstance(value, str) else ""
        if absent is not None and word in absent:
            raise ValueError(f"is refused: {absent[word]}")
        if word not in spellings:
            raise ValueError(f"is not one of {', '.join(names)}{also}")
        return spellings[word]

    bare = switch_names[True] if switch_names else None
    return Kind(metavar="{" + ",".join(names) + "}", read=read, bare=bare)


def only_off(absent: str) -> Kind[bool]:
    """A switch that cannot be on as yet.

    Args:
        absent: what is not there, and what to do instead.
    """

    def read(value: object) -> bool:
        if _read_bool(value):
            raise ValueError(f"is refused: {absent}")
        return False

    return Kind(metavar="", read=read, switch=True)


def several(metavar: str) -> Kind[tuple[str, ...]]:
    """Words with commas between them, or a list of them."""

    def read(value: object) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, Sequence) or not all(isinstance(w, str) and w.strip() for w in words):
            raise ValueError("is not a word, or several with commas between them")
        return tuple(word.strip() for word in words)

    return Kind(metavar=f"{metavar}[,{metavar}]", read=read)


def _read_count(value: object) -> int:
    return _read_size(
        value, parse_count, "a number of tokens from 1 on, such as 32768, 32k (32000) or 32K (32768)"
    )


def _read_bytes(value: object) -> int:
    return _read_size(
        value, parse_bytes, "an amount of memory over 0, such as 512MiB, 4GB or 1073741824"
    )


def _read_size(value: object, parse: Callable[[str], int], wanted: str) -> int:
    number = _as_int(value)
    if number is None and isinstance(value, str):
        try:
            number = parse(value)
        except ValueError:
            number = None
    if number is None or number < 1:
        raise ValueError(f"is not {wanted}")
    return number


def _read_fraction(value: object) -> float:
    number = _as_float(value)
    if not 0 < number <= 1:
        raise ValueError("is not a fraction over 0 and up to 1, such as 0.9")
    return number


def _read_seconds(value: object) -> float:
    number = _as_float(value)
    if not 0 < number < math.inf:
        raise ValueError("is not a number of seconds over 0")
    return number


def _read_text(value: object) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError("is not a name or a path")
    return str(os.fspath(value))


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")
    return value


def _read_mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise ValueError('is not a JSON object such as {"rope_theta": 1000000}')
    return dict(value)


def _as_int(value: object) -> int | None:
    """An int, or text that is one; True is not 1 here."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_float(value: object) -> float:
    """A number, or text that is one; NaN, which no bound lets through, for anything else."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _shown(value: object) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


TOKENS: Kind[int] = Kind(metavar="TOKENS", read=_read_count)
BYTES: Kind[int] = Kind(metavar="BYTES", read=_read_bytes)
FRACTION: Kind[float] = Kind(metavar="FRACTION", read=_read_fraction)
SECONDS: Kind[float] = Kind(metavar="SECONDS", read=_read_seconds)
TEXT: Kind[str] = Kind(metavar="NAME", read=_read_text)
SWITCH: Kind[bool] = Kind(metavar="", read=_read_bool, switch=True)
MAPPING: Kind[Mapping[str, Any]] = Kind(metavar="JSON", read=_read_mapping)
