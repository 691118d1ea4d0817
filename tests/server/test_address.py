"""Addresses that somebody else has."""

import socket

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


def test_of_two_servers_that_start_side_by_side_the_later_one_loads_nothing() -> None:
    with bound(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"--port {port} cannot be listened on: .*another --port"),
            bound(ServerConfig(port=port)),
        ):
            pass
        listen(first, ServerConfig(port=port), 1)


def test_a_server_can_follow_one_whose_connections_linger() -> None:
    with bound(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.getsockname()[1])
        listen(first, config, 1)
        client = socket.create_connection(first.getsockname())
        connection, _ = first.accept()
        connection.close()  # the server's end goes first, and so is the one that lingers
        assert not client.recv(1)
        client.close()
    with bound(config) as second:
        listen(second, config, 1)


def test_who_listens_meanwhile_all_the_same_is_told_of_at_the_end() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        other.bind(("127.0.0.1", 0))
        config = ServerConfig(port=other.getsockname()[1])
        with bound(config) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # as older kernels have it
            other.listen(1)
            with pytest.raises(ConfigError, match=f"--port {config.port} cannot be listened on"):
                listen(sock, config, 1)
