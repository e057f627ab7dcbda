"""ZMQ side of an engine: a subscription to its KV events, and a request to its replay socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from kvroute.http_client import CONNECT_S

_EVENTS_S, _REPLAY_S = 5.0, 3.0
_STORED = "BlockStored"
_MESSAGE_BYTES_MAX = 32 << 20
# Nothing has this number, so only the end of the replay is sent.
_SEQUENCE_NONE_HAS = (2**63 - 1).to_bytes(8, "big")


def port_problem(endpoint: str) -> str:
    """Return why the address of a tcp:// or http:// URL refuses connections; empty if it accepts them."""
    host, _, port = endpoint.rpartition("://")[2].partition("/")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def events_problem(endpoint: str, request: Callable[[], object]) -> str:
    """Subscribe to an engine's events, call `request`, and wait for a store of blocks.

    Returns:
        What is wrong with the events; empty if a store came, and all batches until then in sequence.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with (
        context.socket(zmq.SUB) as events,
        events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor,
    ):
        events.linger, events.maxmsgsize, events.ipv6 = 0, _MESSAGE_BYTES_MAX, "[" in endpoint
        events.subscribe(b"")
        events.connect(endpoint)
        # A publisher drops what it sends before the handshake.
        if not (problem := port_problem(endpoint)) and not monitor.poll(int(CONNECT_S * 1000)):
            problem = "no ZMQ publisher answers at this port"
        request()
        ends_s, expected = time.monotonic() + _EVENTS_S, None
        while not problem:
            if not events.poll(max(0, int((ends_s - time.monotonic()) * 1000))):
                problem = f"a request stored no block within {_EVENTS_S:g} s"
                break
            try:
                _, number, payload = events.recv_multipart()
                batch, sequence = msgspec.msgpack.decode(payload)[1], int.from_bytes(number, "big")
                stored = any(_is_store(event) for event in batch)
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                problem = f"a message is no batch of KV events: {error}"
                break
            if sequence != (expected or sequence):
                problem = f"batch {sequence} came instead of {expected}: events are lost on the way"
            elif stored:
                break
            expected = sequence + 1
        return problem


def _is_store(event: Any) -> bool:
    # SGLang encodes events as arrays.
    return bool((event["type"] if isinstance(event, Mapping) else event[0]) == _STORED)


def replay_problem(endpoint: str) -> str:
    """Return why a replay socket does not answer a request; empty if it does."""
    if problem := port_problem(endpoint):
        return problem
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as asking:
        asking.linger, asking.ipv6 = 0, "[" in endpoint
        asking.connect(endpoint)
        asking.send_multipart([b"", _SEQUENCE_NONE_HAS])
        return "" if asking.poll(int(_REPLAY_S * 1000)) else f"no answer within {_REPLAY_S:g} s"
