"""An engine's own account of where it publishes its KV events: page /kv_event_sources in, ports out. Pure.

The page tells vLLM's KVEventsConfig by data-parallel rank. Engines without it are taken as declared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from indexer.config import RANKS_MAX
from indexer.pod_entry import (
    EVENTS_PORT_LABEL,
    RANKS_LABEL,
    REPLAY_PORT_LABEL,
    TOPIC_LABEL,
    label_problem,
)

_PORTS = 65_536
_ENDPOINT = re.compile(r"tcp://[^\s/]*:([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class EventSources:
    """What an engine tells.

    Attributes:
        told: Whether it has such a page.
        off: Whether it says that it publishes nothing.
        labels: The same as labels of a pods file say it; without a replay port it answers no replays.
    """

    told: bool = False
    off: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


NOT_TOLD = EventSources()
"""Of an engine without such a page, or with one that cannot be read."""


def event_sources(page: bytes, rank: int | None) -> EventSources:
    """Reads a page.

    Args:
        rank: Which engine stands behind the port that was asked; None: all that it tells of.
    """
    try:
        told = msgspec.json.decode(page, type=dict[int, _Source])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOT_TOLD
    ranks = sorted(told)
    if not ranks or len(ranks) > RANKS_MAX:
        return NOT_TOLD
    if not any(source.publishes for source in told.values()):
        return EventSources(told=True, off=True)
    # An engine that tells of itself alone may count itself as 0.
    own = ranks if rank is None or len(ranks) == 1 else [rank]
    if not told.keys() >= set(own):
        return NOT_TOLD
    ports = [_port(told[each].endpoint) for each in own]
    first = ports[0]
    if first is None:
        return NOT_TOLD
    count = len(own) if ports == list(range(first, first + len(own))) else 1
    labels = {EVENTS_PORT_LABEL: str(first), RANKS_LABEL: str(count)}
    replay = _port(told[own[0]].replay_endpoint)
    if max(first, replay or 0) + count > _PORTS:
        return NOT_TOLD
    if replay is not None:
        labels[REPLAY_PORT_LABEL] = str(replay)
    if topic := told[own[0]].topic:
        labels[TOPIC_LABEL] = topic
    if any(label_problem(name, value) for name, value in labels.items()):
        return NOT_TOLD
    return EventSources(told=True, labels=labels)


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


def _port(endpoint: str | None) -> int | None:
    found = _ENDPOINT.fullmatch(endpoint or "")
    return int(found[1]) if found is not None else None
