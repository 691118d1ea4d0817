"""Numbers that a command refuses at once, before it reads or builds anything. Knows no flag itself."""

import math

from kvspan.errors import ConfigError


def refuse_below(*asked: tuple[str, float | None, int]) -> None:
    """Refuses numbers that are too small.

    Args:
        asked: of each flag its name, its value (None = not typed) and the least that it takes.

    Raises:
        ConfigError: a value is below the least.
    """
    for flag, value, least in asked:
        if value is not None and not value >= least:  # nor is nan
            raise ConfigError(f"{flag} {value} is too small: {least} or more.")


def refuse_no_time(flag: str, value_s: float | None) -> None:
    """Refuses a time in which nothing could be done.

    Args:
        flag: its name.
        value_s: seconds, None = not typed; infinity is as long as it takes.

    Raises:
        ConfigError: it is no time over 0.
    """
    if value_s is not None and not value_s > 0:  # nor is nan
        raise ConfigError(f"{flag} {value_s:g} must be more than 0 seconds.")


def refuse_no_rate(flag: str, value: float | None, unit: str) -> None:
    """Refuses a rate at which nothing could come, or all at once.

    Args:
        flag: its name.
        value: None = not typed.
        unit: of the rate, for the sentence.

    Raises:
        ConfigError: it is no number over 0, or infinite.
    """
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{flag} {value:g} must be more than 0 {unit}, and not infinite.")
