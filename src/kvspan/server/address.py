"""Where a server listens. Knows sockets, and no HTTP."""

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from typing import Any

from kvspan.config.server import ServerConfig
from kvspan.errors import ConfigError

_ADDRESSES = (
    "Give an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for whoever reaches it."
)


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket that has the address to itself, before the model is loaded: a taken port costs nothing.

    Nobody can connect until `listen`, so that who looks whether the server is there finds it late, and
    not deaf.

    Raises:
        ConfigError: somebody listens there or is about to, or there is no such address.
    """
    _raise_descriptor_limit()
    try:
        infos = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"--host {config.host}: {error.strerror}. {_ADDRESSES}") from error
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as sock:
        try:
            _bind(sock, address)
        except OSError as error:
            raise _refusal(config, error) from error
        yield sock


def listen(sock: socket.socket, config: ServerConfig, backlog: int) -> None:
    """Takes connections from here on.

    Args:
        sock: it is bound.
        config: where.
        backlog: connections that may wait.

    Raises:
        ConfigError: another server that was started meanwhile listens there.
    """
    _share(sock, True)  # connections inherit it, and the next server may bind while they linger
    try:
        sock.listen(backlog)
    except OSError as error:
        raise _refusal(config, error) from error


def _bind(sock: socket.socket, address: Any) -> None:
    """Binds a socket, alone if that can be.

    Linux keeps the address of a server that has ended from the next one for a minute, unless both share
    it; but two that share it are both bound, and load two models, until one of them listens. So it is
    shared only where it has to be, and for no longer than that takes. A kernel that goes on to share it
    leaves the refusal to `listen`.
    """
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        _share(sock, True)
        sock.bind(address)
        _share(sock, False)


def _share(sock: socket.socket, on: bool) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, on)


def _refusal(config: ServerConfig, error: OSError) -> ConfigError:
    is_elsewhere = error.errno == errno.EADDRNOTAVAIL
    way_out = _ADDRESSES if is_elsewhere else "Choose another --port; 0 is any that is free."
    return ConfigError(
        f"--host {config.host} --port {config.port} cannot be listened on: {error.strerror}. {way_out}"
    )


def _raise_descriptor_limit() -> None:
    """A descriptor for every connection: as many as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
