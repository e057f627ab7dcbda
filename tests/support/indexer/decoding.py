"""Reference decoder: payloads to typed events one by one, for comparison with the column decoder."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from indexer.errors import PayloadError
from indexer.wire.decode import decode_event, split_batch
from indexer.wire.events import KVEvent


class EventBatch(Struct, frozen=True):
    """Event batch of one engine step.

    Attributes:
        ts: Time of publication in seconds since 1970, by the engine's clock.
        events: Events in order.
        data_parallel_rank: The publisher's rank; None if it reports none.
    """

    ts: float
    events: tuple[KVEvent, ...]
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """Batch and its rejected events.

    Attributes:
        batch: All readable events, in order.
        rejected: A reason for each unreadable event.
    """

    batch: EventBatch
    rejected: tuple[str, ...]


def decode_batch(payload: bytes, max_bytes: int) -> Decoded:
    """Decode one payload.

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
