"""Options of a server that are no more than a number, and still can be wrong."""

import pytest

from kvspan.config.server import LEAST_SILENCE_S, ServerConfig
from kvspan.engine.heartbeat import BEAT_S
from kvspan.errors import ConfigError


def test_an_engine_is_left_the_time_for_some_beats() -> None:
    assert LEAST_SILENCE_S >= 3 * BEAT_S
    assert ServerConfig(engine_timeout=LEAST_SILENCE_S).engine_timeout == LEAST_SILENCE_S
    for wrong in ("0.2", 1, "nan", -5, "inf"):
        with pytest.raises(ConfigError, match=r"--engine-timeout .* at least 2"):
            ServerConfig(engine_timeout=wrong)
