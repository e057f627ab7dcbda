"""Whole payloads to typed events, one by one: the plain way, for what shall be compared with the fast one."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from indexer.errors import PayloadError
from indexer.wire.decode import decode_event, split_batch
from indexer.wire.events import KVEvent


class EventBatch(Struct, frozen=True):
    """What one engine step did.

    Attributes:
        ts: When it was published, seconds since the epoch by the engine's clock.
        events: In the order in which they happened.
        data_parallel_rank: The publisher's rank; None where it tells none.
    """

    ts: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch and what had to be left out of it.

    Attributes:
        batch: All events that could be read, in order.
        rejected: A reason for each event that could not.
    """

    batch: EventBatch
    rejected: tuple[str, ...]


def decode_batch(payload: bytes, max_bytes: int) -> Decoded:
    """Reads one payload.

    Raises:
        PayloadError: The payload is "oversize", or "broken_batch".
    """
    raw_batch = split_batch(payload, max_bytes)
    events: list[KVEvent] = []
    rejected: list[str] = []
    for raw in raw_batch.events:
        try:
            events.append(decode_event(raw))
        except PayloadError as error:
            rejected.append(error.reason)
    batch = EventBatch(raw_batch.ts, tuple(events), raw_batch.data_parallel_rank)
    return Decoded(batch, tuple(rejected))
