"""Where a server listens. Knows sockets, and no HTTP."""

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator

from kvspan.config.server import ServerConfig
from kvspan.errors import ConfigError

_ADDRESSES = (
    "Give an address of this machine: 127.0.0.1 for itself alone, 0.0.0.0 for whoever reaches it."
)


@contextlib.contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket on the address, taken before the model is loaded, so that a taken port costs nothing.

    Raises:
        ConfigError: somebody listens there, or there is no such address.
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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise _refusal(config, error) from error
        yield sock


def listen(sock: socket.socket, config: ServerConfig, backlog: int) -> None:
    """Takes connections from here on.

    Two servers may be bound to an address, so that one can follow another at once; one can listen.

    Args:
        sock: it is bound.
        config: where.
        backlog: connections that may wait.

    Raises:
        ConfigError: another server that was started meanwhile listens there.
    """
    try:
        sock.listen(backlog)
    except OSError as error:
        raise _refusal(config, error) from error


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
