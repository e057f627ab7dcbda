"""Model servers that already run: their addresses as users write them, and the ports of their KV events."""

from __future__ import annotations

import socket
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from common.flags import port
from indexer.config import DEFAULT_EVENTS_PORT
from indexer.pod_entry import (
    EVENTS_PORT_LABEL,
    METRICS_PATH_LABEL,
    METRICS_PORT_LABEL,
    MODEL_LABEL,
    REPLAY_PORT_LABEL,
    PodEntry,
)

ENGINE_METAVAR = "HOST:PORT[,events=PORT][,replay=PORT]"
_PORT_OPTIONS = {"events": EVENTS_PORT_LABEL, "replay": REPLAY_PORT_LABEL}


@dataclass(frozen=True, slots=True)
class Engine:
    """Addresses of one model server."""

    address: str  # "ip:port" of its API; identifies the pod
    metrics_url: str
    events_endpoint: str | None  # "tcp://ip:port"; None: its publisher connects to the router, or is unknown
    replay_endpoint: str | None  # None: no replays
    snapshot_url: str | None  # None: no snapshots

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def engine_argument(text: str) -> PodEntry:
    """Parse the value of `--engine`, `ENGINE_METAVAR` with or without http://, and resolve the host.

    Raises:
        ArgumentTypeError: The text has another form, or the host has no address.
    """
    base, *options = text.split(",")
    try:
        url = urlsplit(base if "://" in base else f"http://{base}")
        host, serving = url.hostname or "", url.port or 0
    except ValueError:
        host, serving = "", 0
    if not (host and serving) or url.scheme != "http" or url.path.strip("/"):
        raise ArgumentTypeError(f"must be {ENGINE_METAVAR}, not {text!r}")
    labels = {EVENTS_PORT_LABEL: str(DEFAULT_EVENTS_PORT)}
    for option in options:
        name, _, value = option.partition("=")
        if name not in _PORT_OPTIONS or not port(value):
            raise ArgumentTypeError(f"must be {ENGINE_METAVAR}, not {text!r}: {option!r}")
        labels[_PORT_OPTIONS[name]] = value
    try:
        address = str(socket.getaddrinfo(host, serving, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ArgumentTypeError(f"{host}: {error.strerror}") from None
    return PodEntry(f"{host}:{serving}", "local", address, serving, labels)


def declared_engine(entry: PodEntry) -> Engine:
    """Return the addresses of an engine that a flag or a pods file declares."""
    # The ports do not depend on the model, without which an entry has no stream.
    stream = replace(entry, labels={MODEL_LABEL: "unknown", **entry.labels}).stream()
    assert stream is not None
    metrics_url = _metrics_url(entry.pod, entry.labels)
    return Engine(entry.pod, metrics_url, stream.events_endpoint, stream.replay_endpoint, stream.snapshot_url)


def known_engine(address: str, labels: Mapping[str, str], events: Mapping[str, Any]) -> Engine:
    """Return the addresses of a pod of the router's /debug/pods, by its fields."""
    endpoints = (events.get(name) for name in ("endpoint", "replay_endpoint", "snapshot_url"))
    return Engine(address, _metrics_url(address, labels), *endpoints)


def _metrics_url(address: str, labels: Mapping[str, str]) -> str:
    host, _, serving = address.rpartition(":")
    return (
        f"http://{host}:{labels.get(METRICS_PORT_LABEL, serving)}{labels.get(METRICS_PATH_LABEL, '/metrics')}"
    )
