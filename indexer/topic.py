"""Who published a message that came in on a socket that all connect to: topic and payload in, names out.

The topic is `kv@<pod>@<model>`. A model's name may hold any characters, '@' and '/' too, so only the first
two '@' part it; pods are "ip:port", "[ipv6]:port" or any name. The rank of a data-parallel engine stands in
the batch, not in the topic.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

_PREFIX = b"kv"
_TOPIC_BYTES_MAX = 1024
_RANK_MAX = 65_535
_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_RANK = msgspec.msgpack.Decoder(int | None)


@dataclass(frozen=True, slots=True)
class Topic:
    """The names in a topic.

    Attributes:
        pod: The pod.
        model: The model; never empty.
    """

    pod: str
    model: str


def parse_topic(frame: bytes) -> Topic | None:
    """Reads the topic of a message; None if it names no pod and model."""
    parts = frame.split(b"@", 2) if len(frame) <= _TOPIC_BYTES_MAX else ()
    if len(parts) != 3 or parts[0] != _PREFIX:
        return None
    try:
        pod, model = parts[1].decode(), parts[2].decode()
    except UnicodeDecodeError:
        return None
    usable = pod and model and pod.isprintable() and "#" not in pod and not pod.isspace()
    return Topic(pod, model) if usable else None


def batch_rank(payload: bytes) -> int:
    """The data-parallel rank that a batch names; 0 if it names none, or cannot be read."""
    try:
        parts = _PARTS.decode(payload)
        rank = _RANK.decode(parts[2]) if len(parts) > 2 else None
    except (msgspec.MsgspecError, RecursionError):
        return 0
    return rank if rank is not None and 0 <= rank <= _RANK_MAX else 0
