"""Event columns: decoding many payloads at once equals decoding event by event."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import PayloadError
from indexer.wire import columns as rows
from indexer.wire.columns import Columns, EventDecoder, hash_to_uint64
from indexer.wire.decode import decode_event, split_batch
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tests.support.depth import examples
from tests.support.indexer.event_payloads import PLAIN_ARRAY, PLAIN_MAP, damaged, payloads, unhurried
from tests.support.indexer.views import DATA, read_json, read_lines

MAX_BYTES = 1 << 20
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
hostile = (
    st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda tail: b"\x93\x01\x91" + tail)
    # By number, because a failure prints the strategy, which with all payloads would be too long.
    | damaged(st.integers(0, len(PUBLISHED) - 1).map(lambda number: PUBLISHED[number]))
    | damaged(payloads())
    | payloads()
)


def decode(*payload: bytes) -> Columns:
    """Decode payloads with a new decoder."""
    return EventDecoder(MAX_BYTES).decode(payload)


def decode_events(*events: object) -> Columns:
    """Decode one batch of these events."""
    return decode(msgspec.msgpack.encode([1.5, list(events), 0]))


def outcome(read: Any) -> str:
    """Return an event's text, in which NaN equals NaN, or the reason why it was rejected."""
    try:
        return repr(read())
    except PayloadError as error:
        return error.reason


def check(columns: Columns, payloads: list[bytes]) -> None:
    """Check that rows and typed events equal those decoded one by one."""
    row = 0
    for payload, batch in zip(payloads, columns.batches, strict=True):
        assert batch.first == row
        if batch.unread is not None:
            with pytest.raises(PayloadError, match=r".") as refused:
                split_batch(payload, MAX_BYTES)
            assert (batch.unread, batch.end) == (refused.value.reason, row)
            continue
        raw_batch = split_batch(payload, MAX_BYTES)
        assert repr(batch.ts) == repr(raw_batch.ts)
        for raw, event in zip(raw_batch.events, columns.typed(batch), strict=True):
            actual = event.reason if isinstance(event, PayloadError) else repr(event)
            assert actual == outcome(lambda raw=raw: decode_event(raw))
            if columns.events[row, rows.KIND] != rows.OTHER:
                check_row(columns, row, decode_event(raw))
            row += 1
        assert batch.end == row
    assert row == len(columns.events)
    assert columns.kinds == [columns.events[:, rows.KIND].tolist().count(kind) for kind in range(4)]


def check_row(columns: Columns, row: int, event: KVEvent) -> None:
    """Check that a row for the kernel contains all of its event."""
    cells = columns.events[row].tolist()

    def part(array: Any, start: int, count: int) -> list[int]:
        return array[cells[start] : cells[start] + cells[count]].tolist()

    if isinstance(event, AllBlocksCleared):
        assert cells[rows.KIND] == rows.CLEARED
        return
    assert part(columns.hashes, rows.HASH_START, rows.HASH_COUNT) == list(
        map(hash_to_uint64, event.block_hashes)
    )
    assert rows.MEDIA[cells[rows.MEDIUM]] == (event.medium or "")
    assert cells[rows.GROUP] == (-1 if event.group_idx is None else event.group_idx)
    if isinstance(event, BlockRemoved):
        assert cells[rows.KIND] == rows.REMOVED
        return
    assert cells[rows.KIND] == rows.STORED
    parent = event.parent_block_hash
    assert cells[rows.HAS_PARENT] == (parent is not None)
    assert cells[rows.PARENT] % 2**64 == (0 if parent is None else hash_to_uint64(parent))
    assert part(columns.tokens, rows.TOKEN_START, rows.TOKEN_COUNT) == event.token_ids
    assert cells[rows.BLOCK_SIZE] == event.block_size
    assert cells[rows.HAS_LORA] == (event.lora_name is not None)
    spec_kind = cells[rows.SPEC_KIND]
    assert event.kv_cache_spec_kind == (None if spec_kind < 0 else rows.SPEC_KINDS[spec_kind])
    assert event.cache_salt is None
    assert event.lora_name or not event.lora_id
    assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
    assert all(not entry or entry == [event.lora_name] for entry in event.extra_keys or ())


@pytest.mark.parametrize("published", [PUBLISHED, LLMD, CAPTURED], ids=["engines", "llmd", "captured"])
def test_what_engines_publish_is_read_as_event_by_event(published: list[bytes]) -> None:
    """Vectors and captures of all releases decode the same in one call and in one call each."""
    check(decode(*published), published)
    for payload in published:
        check(decode(payload), [payload])


def test_what_vllm_publishes_is_a_kernels() -> None:
    """The kernel can apply all stores and removals of vLLM without extra keys."""
    columns = decode(*CAPTURED)
    plain = 0
    for batch in columns.batches:
        events = columns.typed(batch)
        if not any(isinstance(event, AllBlocksCleared) for event in events):
            for row, event in enumerate(events, batch.first):
                if not any(getattr(event, "extra_keys", None) or ()):
                    assert columns.events[row, rows.KIND] != rows.OTHER
                    plain += 1
    assert plain > len(columns.events) // 2


@unhurried
@given(st.lists(payloads(), max_size=3))
def test_whatever_is_in_a_batch_is_read_as_event_by_event(batch: list[bytes]) -> None:
    """Events of all layouts and msgpack widths, with invalid and unknown fields, decode the same."""
    check(decode(*batch), batch)


@settings(unhurried, max_examples=examples(200))
@given(st.lists(hostile, max_size=4))
def test_arbitrary_bytes_affect_only_their_payload(batch: list[bytes]) -> None:
    """Arbitrary bytes are rejected or decoded without affecting neighbouring payloads."""
    check(decode(*batch), batch)


@pytest.mark.parametrize(
    "event",
    [
        PLAIN_MAP,
        PLAIN_ARRAY,
        PLAIN_MAP | {"extra_keys": [["sql"], None, ["sql"]]},
        PLAIN_MAP | {"lora_id": None, "lora_name": "", "extra_keys": [[""]] * 3},
        PLAIN_ARRAY[:5],
        {"type": "BlockStored", "block_hashes": []},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": None, "group_idx": 0, "locality": "REMOTE"},
        ["BlockRemoved", [-7]],
        ["BlockRemoved", [-7], "DISK", None, "more"],
        ["AllBlocksCleared", "more"],
    ],
)
def test_plain_events_are_a_kernels(event: object) -> None:
    """Each field of each layout is decoded, also with unknown fields around it."""
    columns = decode_events(event)
    assert columns.events[0, rows.KIND] != rows.OTHER
    check(columns, [msgspec.msgpack.encode([1.5, [event], 0])])


@pytest.mark.parametrize(
    "change",
    [
        {"type": "New"},
        {"type": None},
        {"block_hashes": [1, 2, b"x" * 65]},
        {"block_hashes": [1, 2, "text"]},
        {"token_ids": [-1]},
        {"token_ids": [2**32]},
        {"token_ids": None},
        {"token_ids": b"\x01"},
        {"block_size": 2**21 + 1},
        {"lora_name": None},
        {"medium": "TAPE"},
        {"extra_keys": [["sqm"], None, None]},
        {"extra_keys": [["sql", "salt"], None, None]},
        {"extra_keys": ["sql", None, None]},
        {"extra_keys": [["sql"], ["sql"]]},
        {"kv_cache_spec_kind": "brand_new"},
        {"cache_salt": "tenant"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unusual_events_are_left_to_the_view(change: dict[str, Any]) -> None:
    """An event with one unusual field is left to the view; its neighbours are decoded."""
    removed = {"type": "BlockRemoved", "block_hashes": [1]}
    columns = decode_events(removed, PLAIN_MAP | change, removed)
    assert columns.events[1, rows.KIND] == rows.OTHER
    assert columns.typed(columns.batches[0])[::2] == [BlockRemoved([1])] * 2
    check(columns, [msgspec.msgpack.encode([1.5, [removed, PLAIN_MAP | change, removed], 0])])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([1.5, [], "rank"]),
        msgspec.msgpack.encode([1.5, []]) + b"\0",
        # Lengths beyond the end of the data.
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\xdf\xff\xff\xff\xff" * 3,
        b"\x92\x01" + b"\x91" * 100_000,
        b"\x92\x01\xdd\x00\x01\x00\x01" + b"\xc0" * 65_537,
    ],
)
def test_a_broken_batch_does_not_affect_its_neighbours(payload: bytes) -> None:
    """A payload that is not a batch has no events; those before and after it are decoded."""
    good = [msgspec.msgpack.encode([ts, [["BlockRemoved", [ts]]]]) for ts in (1, 2)]
    columns = decode(good[0], payload, good[1])
    assert [batch.unread for batch in columns.batches] == [None, "broken_batch", None]
    read = [event for batch in columns.batches for event in columns.typed(batch)]
    assert read == [BlockRemoved([1]), BlockRemoved([2])]


def test_a_too_long_payload_is_rejected() -> None:
    """A payload above the size limit is flagged; its neighbours are decoded."""
    short, long = (msgspec.msgpack.encode([1.5, [["BlockRemoved", [1] * count]]]) for count in (1, 2))
    columns = EventDecoder(len(short)).decode([long, short, long])
    assert [batch.unread for batch in columns.batches] == ["oversize", None, "oversize"]
    assert len(columns.events) == 1


def test_a_list_of_tokens_ends_where_its_field_ends() -> None:
    """A wrong token count never includes tokens of the next event."""
    whole = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}
    payload = msgspec.msgpack.encode([1.5, [whole, whole], 0])
    for claimed in (b"\x93", b"\x95", b"\xdd\xff\xff\xff\xff"):
        broken = payload.replace(b"\x94\1\2\3\4", claimed + b"\1\2\3\4", 1)
        check(decode(broken, payload), [broken, payload])


def test_empty_input_has_no_rows() -> None:
    """A call without payloads or events gives no rows."""
    assert len(decode().batches) == len(decode().events) == 0
    empty = decode(msgspec.msgpack.encode([1.5, []]))
    assert (len(empty.batches), len(empty.events), empty.kinds) == (1, 0, [0, 0, 0, 0])
    assert empty.events.dtype == np.int64


def test_a_stored_event_has_all_that_the_view_needs() -> None:
    """An event left to the view is typed in full, with its tokens, extra keys and salt."""
    fields = {**PLAIN_MAP, "cache_salt": "tenant", "extra_keys": [["sql", b"x"], None, None]}
    columns = decode_events(fields)
    (event,) = columns.typed(columns.batches[0])
    assert isinstance(event, BlockStored)
    for name in BlockStored.__struct_fields__:
        assert getattr(event, name) == fields.get(name)
