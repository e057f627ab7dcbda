"""Messages between peers: encoding, validation and bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.config import IndexerConfig
from indexer.errors import PeerError
from indexer.index.layout import HeldBlocks
from indexer.peers.messages import MESSAGE_BYTES_MAX, read_messages, snapshot_messages
from indexer.views.view_parts import ViewPart, ViewSnapshot
from tests.support.depth import examples
from tests.support.indexer.peer_views import DIGEST, PODS, TIERS, Views, payload, removal

POD = PODS[0]
Message = dict[str, Any]
GROUPED = {
    "type": "BlockStored",
    "block_hashes": [5, 6],
    "parent_block_hash": None,
    "token_ids": [1] * 8,
    "block_size": 4,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
WINDOW = GROUPED | {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 8,
}


def a_snapshot() -> list[bytes]:
    """Return a snapshot of a view with groups, copies and tiers."""
    views = Views()
    views.apply(POD, [msgspec.msgpack.encode([1.0, [GROUPED, WINDOW], None])])
    views.apply(POD, [payload((1, 2, 3)), payload((1, 2)), removal((1, 2, 3)), payload((3, 3))])
    return list(snapshot_messages(views.snapshot(POD)))


TOLD = a_snapshot()


def read_all(messages: list[bytes], max_bytes: int = 1 << 24) -> ViewSnapshot:
    """Read a snapshot for an index with the tests' settings."""
    config = IndexerConfig(block_tokens=4, snapshot_max_bytes=max_bytes)
    return read_messages(messages, config, len(TIERS.names))[0]


def use(messages: list[bytes]) -> None:
    """Apply a snapshot and use the view."""
    views = Views()
    views.take(POD, messages)
    views.apply(POD, [payload((1, 2, 3, 1)), removal((1, 2, 3)), payload((1, 2), start=1)])
    views.copies(POD)
    views.snapshot(POD)
    views.states[POD].view.clear()
    assert not views.copies(POD)


def test_a_snapshot_survives_encoding() -> None:
    """Sequence number, digest and facts are decoded, and each part is one message of at most 1 MiB."""
    views = Views()
    views.apply(POD, [payload(tuple(number % 3 for number in range(9000)))])
    snapshot = views.snapshot(POD)
    messages = list(snapshot_messages(snapshot))
    assert len(messages) == len(snapshot.parts) + 2 > 4
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX
    read = read_all(messages)
    assert (read.sequence, read.digest, read.evicted_blocks) == (7, DIGEST, 0)
    assert read.facts == snapshot.facts
    use(TOLD)


def test_a_part_above_the_message_limit_is_rejected() -> None:
    """A part of more than 1 MiB is rejected with a reason."""
    keys = np.arange(MESSAGE_BYTES_MAX // 8 + 1, dtype=np.uint64)
    snapshot = Views().snapshot(POD)
    none = np.empty(0, np.uint8)
    part = ViewPart(None, HeldBlocks(keys, none, none, keys, np.empty((0, 3), np.int64)))
    large = ViewSnapshot(7, DIGEST, snapshot.facts, 0, [part])
    with pytest.raises(PeerError, match="too_large"):
        list(snapshot_messages(large))


def changed(kind: str, **fields: object) -> Callable[[Message], Message]:
    """Return the messages with fields of one kind of message replaced."""
    return lambda message: message | fields if message["type"] == kind else message


def fact(**fields: object) -> Callable[[Message], Message]:
    """Return the header with fields of its facts replaced."""
    return lambda message: (
        message | {"facts": message["facts"] | fields} if message["type"] == "header" else message
    )


LEAD = {"group": 0, "usable": True, "leads": True}
FAULTS: dict[str, Callable[[Message], Message]] = {
    "digest": changed("header", digest=b"short"),
    "sequence": changed("header", sequence=-1),
    "last sequence": changed("header", sequence=(1 << 64) - 1),
    "run tokens": fact(run_tokens=3),
    "no run tokens": fact(run_tokens=0),
    "stride": fact(groups=[LEAD | {"stride": 0}]),
    "group's stride": fact(groups=[{"group": 1, "usable": True, "leads": False, "stride": 0}]),
    "group's number": fact(groups=[LEAD | {"group": -1}]),
    "two groups": fact(groups=[LEAD, LEAD]),
    "two leads": fact(groups=[LEAD, LEAD | {"group": 2}]),
    "useless lead": fact(groups=[LEAD | {"usable": False}]),
    "untold group": fact(groups=[LEAD]),
    "no keys": changed("held", keys=b""),
    "half a key": lambda m: m | {"keys": m["keys"][:-1]} if m["type"] == "held" else m,
    "a key less": lambda m: m | {"keys": m["keys"][:-8]} if m["type"] == "held" else m,
    "a name less": lambda m: m | {"names": m["names"][:-8]} if m["type"] == "held" else m,
    "name 0": lambda m: m | {"names": bytes(len(m["names"]))} if m["type"] == "held" else m,
    "no tier": lambda m: m | {"tiers": bytes(len(m["tiers"]))} if m["type"] == "held" else m,
    "unknown tier": lambda m: m | {"tiers": b"\xff" * len(m["tiers"])} if m["type"] == "held" else m,
    "half a copy": changed("held", copies=bytes(16)),
    "no copies": changed("held", copies=np.array([0, 0, 0], np.int64).tobytes()),
    "too many copies": changed("held", copies=np.array([0, 0, 1 << 40], np.int64).tobytes()),
    "copies of none": changed("held", copies=np.array([99, 0, 1], np.int64).tobytes()),
    "copies of a place before": changed("held", copies=np.array([-1, 0, 1], np.int64).tobytes()),
    "copies elsewhere": changed("held", copies=np.array([0, 3, 1], np.int64).tobytes()),
    "end": changed("end", parts=1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_field_is_checked(fault: str) -> None:
    """One invalid value rejects the whole snapshot."""
    change = FAULTS[fault]
    before = [msgspec.msgpack.decode(message, strict=False) for message in TOLD]
    after = [change(message) for message in before]
    assert after != before
    with pytest.raises(PeerError, match="broken"):
        read_all([msgspec.msgpack.encode(message) for message in after])


def test_only_whole_snapshots_in_order_are_read() -> None:
    """A snapshot with missing, repeated or reordered messages is rejected."""
    messages = TOLD
    header, *parts, end = messages
    for wrong in (
        [],
        messages[:-1],
        messages[1:],
        [header, *messages],
        [*messages, end],
        [*messages, parts[0]],
        [header, *parts[1:], end],
        [*parts, header, end],
    ):
        with pytest.raises(PeerError, match="broken"):
            read_all(wrong)


def test_what_is_read_is_bounded() -> None:
    """All messages count in bytes, small ones with a minimum."""
    with pytest.raises(PeerError, match="too_large"):
        read_all(TOLD, max_bytes=2048)
    header = TOLD[0]
    block = {"keys": bytes(8), "tiers": b"\1", "name_counts": b"\0", "names": b"", "copies": b""}
    nothing = msgspec.msgpack.encode({"type": "held", "group": None, **block})
    with pytest.raises(PeerError, match="too_large"):
        read_all([header, *[nothing] * 100], max_bytes=1 << 16)


@st.composite
def spoilt(draw: st.DrawFn, messages: list[bytes]) -> list[bytes]:
    """Return messages of which some are lost, doubled, truncated or changed in a few bytes."""
    found = list(messages)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found) - 1))
        match draw(st.sampled_from(["lose", "double", "cut", "change", "change", "change", "invent"])):
            case "lose" if len(found) > 1:
                del found[at]
            case "double":
                found.insert(at, found[at])
            case "cut":
                found[at] = found[at][: draw(st.integers(0, len(found[at])))]
            case "invent":
                found[at] = draw(st.binary(max_size=64))
            case _:
                data = bytearray(found[at])
                if data:
                    data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
                found[at] = bytes(data)
    return found


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_no_message_breaks_an_index(data: st.DataObject) -> None:
    """Any messages are rejected with a reason, or give a view that can be used and cleared."""
    messages = data.draw(spoilt(TOLD))
    try:
        read_all(messages)
    except PeerError:
        pass
    else:
        use(messages)
