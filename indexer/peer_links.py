"""How peers are reached: names in, addresses and gRPC channels out; each call may take its time."""

from __future__ import annotations

import socket

import grpc

from indexer.config import IndexerConfig
from indexer.errors import ConfigError
from indexer.tls import client_credentials

_CONNECT_MS = 3000


def resolve(peer: str) -> list[tuple[str, str]]:
    """Host and address of all that a peer's name stands for, each once.

    Args:
        peer: HOST:PORT.

    Raises:
        OSError: Nobody has that name.
    """
    host, _, port = peer.rpartition(":")
    host = host.strip("[]")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return [(host, f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}") for ip in addresses]


def credentials(config: IndexerConfig) -> grpc.ChannelCredentials | None:
    """What peers are shown, and held against; None: no TLS.

    Raises:
        ConfigError: A file cannot be read.
    """
    if config.peer_ca is None:
        return None
    try:
        return client_credentials(config.peer_ca, config.peer_cert, config.peer_key)
    except ConfigError as error:
        raise ConfigError(f"--peer-ca, --peer-cert, --peer-key: {error}") from error


def open_channel(config: IndexerConfig, host: str, address: str, *, receive_bytes_max: int) -> grpc.Channel:
    """A channel of its own to one address; the caller closes it.

    Args:
        host: The peer's name, which its certificate must be for.

    Raises:
        ConfigError: A file cannot be read.
    """
    options = [
        ("grpc.max_receive_message_length", receive_bytes_max),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ]
    shown = credentials(config)
    if shown is None:
        return grpc.insecure_channel(address, options)
    # The certificate is the name's, not the address's.
    return grpc.secure_channel(address, shown, [*options, ("grpc.ssl_target_name_override", host)])
