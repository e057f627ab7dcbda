"""Model servers that already run: as users write them, and as the router's /debug/pods lists them."""

from __future__ import annotations

import socket
from argparse import ArgumentTypeError
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec

from common.flags import port
from indexer.config import DEFAULT_EVENTS_PORT, PodStream
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


class Engine(msgspec.Struct):
    """Engine as a pod of /debug/pods, as far as it is read."""

    address: str  # "ip:port" of its API
    name: str = ""
    ready: bool = False
    why_not: str = ""
    view: str | None = None
    labels: dict[str, str] = {}
    stream: PodStream | None = None

    @property
    def metrics_url(self) -> str:
        host, _, port = self.address.rpartition(":")
        port = self.labels.get(METRICS_PORT_LABEL, port)
        return f"http://{host}:{port}{self.labels.get(METRICS_PATH_LABEL, '/metrics')}"


def engine_argument(text: str) -> PodEntry:
    """Parse the value of `--engine`, `ENGINE_METAVAR` with or without http://, and resolve the host.

    Raises:
        ArgumentTypeError: The text has another form, or the host has no address.
    """
    base, *options = text.split(",")
    labels = {EVENTS_PORT_LABEL: str(DEFAULT_EVENTS_PORT)}
    try:
        url = urlsplit(base if "://" in base else f"http://{base}")
        host, serving = url.hostname or "", url.port or 0
        for name, _, value in (option.partition("=") for option in options):
            labels[_PORT_OPTIONS[name]] = str(port(value) or port(""))
        if not (host and serving) or url.scheme != "http" or url.path.strip("/"):
            raise ValueError
        address = str(socket.getaddrinfo(host, serving, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ArgumentTypeError(f"{host}: {error.strerror}") from None
    except (ValueError, KeyError, ArgumentTypeError):
        raise ArgumentTypeError(f"must be {ENGINE_METAVAR}, not {text!r}") from None
    return PodEntry(f"{host}:{serving}", "local", address, serving, labels)


def declared_engine(entry: PodEntry) -> Engine:
    """Return the engine that a flag declares."""
    # Ports do not depend on the model, without which an entry has no stream.
    stream = replace(entry, labels={MODEL_LABEL: "unknown", **entry.labels}).stream()
    return Engine(entry.pod, entry.name, labels=dict(entry.labels), stream=stream)
