"""The parser: what engines publish, read to the same events as by `decode`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import event_rows as rows
from indexer.decode import decode_event, split_batch
from indexer.events import BlockRemoved, BlockStored, KVEvent
from indexer.parse import EventParser, Parsed
from tests.unit.indexer_support import DATA, read_json, read_lines
from tests.unit.parse_support import (
    MAX_BYTES,
    PLAIN_ARRAY,
    PLAIN_MAP,
    as_rows_tell,
    check,
    depends_on_tokens_alone,
    payloads,
    told_by,
    unhurried,
)

PUBLISHED = [bytes.fromhex(vector["hex"]) for vector in read_json("kv_event_vectors.json.gz")]
LLMD = [
    bytes.fromhex(message["payload_hex"])
    for vector in read_json("llmd_event_vectors.json.gz")
    for message in vector["messages"]
]
CAPTURED = [
    bytes.fromhex(line["frames"][2])
    for path in sorted(DATA.glob("*_frames.jsonl.gz"))
    for line in read_lines(path.name)
    if line["kind"] == "frames"
]


def parse(*payload: bytes) -> Parsed:
    """Parses with a parser of its own."""
    return EventParser(MAX_BYTES).parse(payload)


def parse_events(*events: object) -> Parsed:
    """Parses one batch of these events."""
    return parse(msgspec.msgpack.encode([1.5, list(events), 0]))


def is_plain(event: KVEvent) -> bool:
    """Whether the fast path shall read an event itself."""
    if not isinstance(event, BlockStored):
        return getattr(event, "medium", None) in (None, *rows.MEDIA)
    return (
        event.medium in (None, *rows.MEDIA)
        and depends_on_tokens_alone(event)
        and event.cache_salt is None
        and not (event.lora_id and not event.lora_name)
        and (event.lora_name or "").isascii()
    )


@pytest.mark.parametrize("published", [PUBLISHED, LLMD, CAPTURED], ids=["engines", "llmd", "captured"])
def test_what_engines_publish_is_read_as_by_decode(published: list[bytes]) -> None:
    """Vectors and captures of all releases, parsed in one call, tell the same; no plain event is left out."""
    parsed = parse(*published)
    check(parsed, published)
    for batch, payload in zip(parsed.batches, published, strict=True):
        if batch[rows.STATUS] != rows.OK:
            continue
        for row, raw in enumerate(split_batch(payload, MAX_BYTES).events, start=batch[rows.FIRST_EVENT]):
            if parsed.events[row, rows.KIND] == rows.OTHER:
                assert not _is_read_and_plain(raw)


def _is_read_and_plain(raw: msgspec.Raw) -> bool:
    try:
        return is_plain(decode_event(raw))
    except ValueError:
        return False


@unhurried
@given(st.lists(payloads(), max_size=3))
def test_whatever_is_in_a_batch_is_read_as_by_decode(batch: list[bytes]) -> None:
    """Events of all layouts, in all widths of msgpack, with odd fields and unknown ones, tell the same."""
    check(parse(*batch), batch)


@pytest.mark.parametrize(
    "event",
    [
        PLAIN_MAP,
        PLAIN_ARRAY,
        dict(reversed(PLAIN_MAP.items())) | {"extra_keys": None},
        PLAIN_MAP | {"extra_keys": [["sql"], None, ["sql"]]},
        PLAIN_MAP | {"lora_id": None, "lora_name": "", "extra_keys": [[""]] * 3},
        PLAIN_ARRAY[:5],
        {"type": "BlockStored", "block_hashes": []},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": None, "group_idx": 0, "locality": "REMOTE"},
        ["BlockRemoved", [-7]],
        ["BlockRemoved", [-7], "DISK", None, "more"],
        ["AllBlocksCleared", "more"],
        {"type": "AllBlocksCleared", "locality": "LOCAL"},
    ],
)
def test_plain_events_are_read_without_decode(event: object) -> None:
    """Each field of each layout is read, in any order, with unknown fields around it."""
    parsed = parse_events(event)
    assert parsed.events[0, rows.KIND] != rows.OTHER
    assert told_by(parsed, 0) == as_rows_tell(decode_event(msgspec.msgpack.encode(event)))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "New"},
        {"type": "OTHER"},
        {"type": None},
        {"block_hashes": None},
        {"block_hashes": [1, 2, b""]},
        {"block_hashes": [1, 2, b"x" * 65]},
        {"block_hashes": [1, 2, "text"]},
        {"block_hashes": [1, 2, 1.0]},
        {"block_hashes": [1, 2, True]},
        {"parent_block_hash": "text"},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": b"\x01"},
        {"block_size": -1},
        {"block_size": 2**21 + 1},
        {"lora_id": -1},
        {"lora_name": None},
        {"lora_name": ""},
        {"lora_name": "ü"},
        {"medium": "gpu"},
        {"medium": "TAPE"},
        {"extra_keys": [["sqm"], None, None]},
        {"extra_keys": [["sq"], None, None]},
        {"extra_keys": [["sql", "salt"], None, None]},
        {"extra_keys": ["sql", None, None]},
        {"extra_keys": [["sql"], ["sql"]]},
        {"lora_id": None, "lora_name": None, "extra_keys": [[""], None, None]},
        {"extra_keys": [[], None, None]},
        {"extra_keys": [None]},
        {"group_idx": -1},
        {"group_idx": 65_536},
        {"kv_cache_spec_kind": "brand_new"},
        {"kv_cache_spec_sliding_window": 2**31},
        {"cache_salt": "tenant"},
        {"new": [[[]]] * 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unusual_events_are_left_to_decode(change: dict[str, Any]) -> None:
    """One odd field, and the event is of kind OTHER with its bytes; its neighbours are read."""
    event = PLAIN_MAP | change
    parsed = parse_events(["BlockRemoved", [1]], event, ["BlockRemoved", [2]])
    assert parsed.events[:, rows.KIND].tolist() == [rows.REMOVED, rows.OTHER, rows.REMOVED]
    assert parsed.event_bytes(1) == msgspec.msgpack.encode(event)
    assert told_by(parsed, 2) == BlockRemoved([2], "")


@pytest.mark.parametrize(
    "event", [*(PLAIN_ARRAY[:elements] for elements in range(5)), ["BlockRemoved"], {"type": "BlockRemoved"}]
)
def test_events_without_all_that_they_must_have_are_left_to_decode(event: object) -> None:
    """An array that ends too early, or a map without hashes, is not read as far as it goes."""
    assert parse_events(event).events[:, rows.KIND].tolist() == [rows.OTHER]


def test_fields_of_another_kind_are_left_to_decode() -> None:
    """A removal with tokens is a removal for decode; no row has columns that its kind does not."""
    parsed = parse_events(
        {"type": "BlockRemoved", "block_hashes": [1], "token_ids": [5]},
        {"type": "AllBlocksCleared", "block_hashes": [1]},
    )
    assert parsed.events[:, rows.KIND].tolist() == [rows.OTHER, rows.OTHER]
    assert decode_event(parsed.event_bytes(0)) == BlockRemoved([1])


def test_fields_that_come_twice_are_left_to_decode() -> None:
    """Which of two would count is decode's business; a field twice is never read as plain."""
    twice = b"\x83\xa4type\xacBlockRemoved" + b"\xacblock_hashes\x91\x01" + b"\xacblock_hashes\x91\x02"
    parsed = parse(b"\x92\x01\x91" + twice)
    assert parsed.events[0, rows.KIND] == rows.OTHER
    assert parsed.event_bytes(0) == twice


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1.5, "events": []}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([None, []]),
        msgspec.msgpack.encode([1.5, {}]),
        msgspec.msgpack.encode([1.5, [], "rank"]),
        msgspec.msgpack.encode([1.5, [], 1.0]),
        msgspec.msgpack.encode([1.5, []]) + b"\0",
        msgspec.msgpack.encode([1.5, [["BlockRemoved", [1]]]])[:-1],
        # Lengths that are only claimed.
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\xc6\xff\xff\xff\xff",
        b"\x92\x01\x91\xdf\xff\xff\xff\xff" * 3,
        b"\x92\x01" + b"\x91" * 100_000,
        b"\x92\x01\xdd\x00\x01\x00\x01" + b"\xc0" * 65_537,
    ],
)
def test_a_broken_batch_costs_its_neighbours_nothing(payload: bytes) -> None:
    """A payload that is no batch has no events; those before and after it are read."""
    good = [msgspec.msgpack.encode([ts, [["BlockRemoved", [ts]]]]) for ts in (1, 2)]
    batch = [good[0], payload, good[1]]
    parsed = parse(*batch)
    check(parsed, batch)
    assert parsed.batches[:, rows.STATUS].tolist() == [rows.OK, rows.BROKEN_BATCH, rows.OK]
    assert [told_by(parsed, row).block_hashes for row in range(2)] == [[1], [2]]


def test_a_payload_that_is_too_long_is_not_read() -> None:
    """It is flagged, and not even a part of what is read."""
    short, long = (msgspec.msgpack.encode([1.5, [["BlockRemoved", [1] * count]]]) for count in (1, 2))
    parsed = EventParser(len(short)).parse([long, short, long])
    assert parsed.batches[:, rows.STATUS].tolist() == [rows.OVERSIZE, rows.OK, rows.OVERSIZE]
    assert parsed.data.tobytes() == short
    assert not parsed.all_read
    assert len(parsed.events) == 1


def test_nothing_to_parse_is_no_event() -> None:
    """A call without payloads gives no rows."""
    parsed = parse()
    assert len(parsed.batches) == len(parsed.events) == 0


def test_arrays_of_an_unusual_call_are_given_back() -> None:
    """After one call with very many hashes and events, the arrays of an ordinary one are small again."""
    parser = EventParser(16 << 20)
    many = msgspec.msgpack.encode([1, [["BlockRemoved", [1] * 100]] * 65_536])
    assert len(parser.parse([many, many]).hashes) > 8 << 20
    ordinary = parser.parse(PUBLISHED[:3])
    check(ordinary, PUBLISHED[:3])
    assert len(ordinary.hashes) <= 4 << 20
    assert len(ordinary.tokens) <= 4 << 20
    assert ordinary.events.base is not None
    assert len(ordinary.events.base) <= 65_536


def test_arrays_grow_and_are_used_again() -> None:
    """Calls of any size give the same rows by one parser as by one each; many events need no tokens."""
    parser = EventParser(MAX_BYTES)
    calls = [
        PUBLISHED[:3],
        [msgspec.msgpack.encode([1, [["AllBlocksCleared"]] * 50_000])],
        CAPTURED,
        LLMD[:1],
    ]
    for call in calls:
        parsed, alone = parser.parse(call), EventParser(MAX_BYTES).parse(call)
        check(parsed, call)
        np.testing.assert_array_equal(parsed.events, alone.events)
        np.testing.assert_array_equal(parsed.batches, alone.batches)
