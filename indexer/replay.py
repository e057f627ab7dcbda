"""One question to an engine's replay socket, and its answers.

Speaks vLLM's protocol over a DEALER, all forms: ["", sequence] is asked; ["", sequence, payload] up to vLLM
0.24 or ["", topic, sequence, payload] later and from SGLang is answered, the last with a sequence of -1 and
no payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import zmq

SEQUENCE_BYTES = 8
_END_SEQUENCE = b"\xff" * SEQUENCE_BYTES


class Batch(msgspec.Struct, frozen=True):
    """A published batch, not yet decoded."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The engine has told all that it knows."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A message that does not follow the protocol."""

    reason: str


def replay_socket(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int, max_message_bytes: int
) -> zmq.Socket[bytes]:
    """Ask an engine's ROUTER socket for all from a sequence number on; the socket gets its answers.

    Args:
        max_message_bytes: Above it the connection is cut.

    Raises:
        zmq.ZMQError: The endpoint is unusable.
    """
    asked = context.socket(zmq.DEALER)
    asked.linger = 0
    asked.maxmsgsize = max_message_bytes
    # The engine's ROUTER drops what we do not take at once, and a replay is as long as its buffer.
    asked.rcvhwm = 100_000
    asked.ipv6 = "[" in endpoint
    try:
        asked.connect(endpoint)
        asked.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
    except zmq.ZMQError:
        asked.close()
        raise
    return asked


def parse_answer(frames: list[bytes]) -> Batch | End | Broken:
    """Reads one message of a replay socket."""
    if len(frames) not in (3, 4) or frames[0]:
        return Broken("replay_frames")
    sequence, payload = frames[-2:]
    if sequence == _END_SEQUENCE:
        return End()
    return _batch(sequence, payload)


def parse_live(frames: list[bytes]) -> Batch | Broken:
    """Reads one message of a publisher: [topic, sequence, payload]."""
    return _batch(frames[1], frames[2]) if len(frames) == 3 else Broken("frame_count")


def _batch(sequence: bytes, payload: bytes) -> Batch | Broken:
    if len(sequence) != SEQUENCE_BYTES or sequence == _END_SEQUENCE:
        return Broken("sequence")
    return Batch(int.from_bytes(sequence, "big"), payload)
