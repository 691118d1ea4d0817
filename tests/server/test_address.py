"""Addresses that somebody else has."""

import pytest

from kvspan.config.server import ServerConfig
from kvspan.errors import ConfigError
from kvspan.server.address import bound, listen


def test_an_address_that_is_taken_costs_no_start() -> None:
    with bound(ServerConfig(port=0)) as first:
        listen(first, ServerConfig(port=0), 1)
        port = first.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"--port {port} cannot be listened on: .*another --port"),
            bound(ServerConfig(port=port)),
        ):
            pass


def test_of_two_servers_that_start_side_by_side_the_later_one_says_why_it_ends() -> None:
    with bound(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.getsockname()[1])
        with bound(config) as second:
            listen(second, config, 1)
            with pytest.raises(ConfigError, match=f"--port {config.port} cannot be listened on"):
                listen(first, config, 1)
