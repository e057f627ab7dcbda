"""The state of an engine's cache as its model server tells it: bytes in, batches of events out.

`GET /kv_events/snapshot` answers with one msgpack map: `schema` 1, `boot_id` of the process, `sequence`
(number of the first batch that is not in it), `block_size`, `blocks` (copies told) and `batches`, payloads of
the very form that is published. Applied in order to an empty view they give what the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from indexer.view_parts import ViewSnapshot

SCHEMA = 1

_SEQUENCE_MAX = (1 << 64) - 2


@dataclass(frozen=True, slots=True)
class SnapshotError:
    """Why there is no snapshot.

    Attributes:
        reason: Short label for metrics; "not_offered" where the engine knows no snapshots.
    """

    reason: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's cache holds at one moment.

    Attributes:
        schema: Version of this form.
        boot_id: Names the process.
        sequence: Number of the first batch of its stream that is not in here.
        block_size: Tokens of one of its blocks.
        blocks: Copies of blocks in here.
        batches: Payloads, parents before children.
    """

    schema: int
    boot_id: str
    sequence: int
    block_size: int
    blocks: int
    batches: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """What asking an engine, and then our peers, for a snapshot gave.

    Attributes:
        answer: The engine's snapshot, or another router's view; None: nobody gave one.
        size_bytes: Of its messages.
        refusal: Why the engine itself gave none; None where it did, or was not asked.
        source: Who gave it: "engine", "peer" or "redis".
    """

    answer: Snapshot | ViewSnapshot | None
    size_bytes: int = 0
    refusal: str | None = None
    source: str = "engine"


_DECODER = msgspec.msgpack.Decoder(Snapshot)


def read_snapshot(data: bytes) -> Snapshot | SnapshotError:
    """Reads the body of an answer."""
    try:
        snapshot = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SnapshotError("broken")
    if snapshot.schema != SCHEMA:
        return SnapshotError("schema")
    return snapshot if 0 <= snapshot.sequence <= _SEQUENCE_MAX else SnapshotError("sequence")
