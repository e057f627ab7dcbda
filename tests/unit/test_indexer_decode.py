"""Decoding: every layout that engines publish, and anything else without harm."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.decode import Decoded, decode_batch
from indexer.errors import PayloadError
from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.unit.indexer_support import read_json

VECTORS = read_json("kv_event_vectors.json.gz")
LLMD_VECTORS = {vector["id"]: vector for vector in read_json("llmd_event_vectors.json.gz")}
MAX_BYTES = 1 << 20

ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
tagged = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Unheard"]).flatmap(
    lambda tag: (
        st.lists(json_like, max_size=13).map(lambda fields: [tag, *fields])
        | st.dictionaries(st.sampled_from(ARRAY_FIELDS["BlockStored"]), json_like).map(
            lambda fields: {"type": tag, **fields}
        )
    )
)


def decode(*events: object, tail: tuple[object, ...] = (0,)) -> Decoded:
    """Decodes a batch of these events."""
    return decode_batch(msgspec.msgpack.encode([1.5, list(events), *tail]), MAX_BYTES)


def with_bytes(value: Any) -> Any:
    """A vector's value with its byte strings."""
    if isinstance(value, dict):
        if "$bytes" in value:
            return bytes.fromhex(value["$bytes"])
        return {name: with_bytes(item) for name, item in value.items()}
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


def fields_told(event: Any) -> dict[str, Any]:
    """An event of a vector, in whichever layout, by field name."""
    if isinstance(event, dict):
        return event
    return {"type": event[0], **dict(zip(ARRAY_FIELDS[event[0]], event[1:], strict=False))}


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: f"{vector['source']}-{vector['version']}-{vector['name']}"
)
def test_what_engines_publish_is_read_in_full(vector: dict[str, Any]) -> None:
    """Each vector of seven engine releases gives its events, with every field that we know."""
    decoded = decode_batch(bytes.fromhex(vector["hex"]), MAX_BYTES)
    ts, events, *rank = with_bytes(vector["generic"])
    assert decoded.rejected == ()
    assert decoded.batch.ts == ts
    assert decoded.batch.data_parallel_rank == (rank[0] if rank else None)
    assert len(decoded.batch.events) == len(events)
    for event, told in zip(decoded.batch.events, map(fields_told, events), strict=True):
        assert type(event).__name__ == told["type"]
        for name in event.__struct_fields__:
            assert getattr(event, name) == told.get(name, getattr(event, name)), name


def test_elements_behind_the_known_ones_are_ignored() -> None:
    """Longer batches, longer arrays and unknown map fields are read as far as they are known."""
    array = ["BlockStored", [1], None, [5], 1, None, "GPU", None, None, 0, "mamba", 64, "LOCAL", {"new": 1}]
    as_map = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "locality": "LOCAL", "new": [[]]}
    for tail in ((), (3,), (None, "more"), (0, 1, 2)):
        decoded = decode(array, as_map, tail=tail)
        assert [type(event) for event in decoded.batch.events] == [BlockStored, BlockRemoved]
        assert decoded.batch.events[0].kv_cache_spec_sliding_window == 64


@pytest.mark.parametrize(
    "number", [0, 1, 200, -1, -7, 2**32, -(2**63), 2**63 - 1, 2**64 - 1, b"x", b"\0" * 32]
)
def test_hashes_of_any_width_are_kept_as_they_are(number: int | bytes) -> None:
    """Small, large and negative numbers and byte strings are handles of equal right."""
    decoded = decode(
        ["BlockStored", [number], number, [5], 1], {"type": "BlockRemoved", "block_hashes": [number]}
    )
    assert decoded.batch.events == (BlockStored([number], number, [5], 1), BlockRemoved([number]))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (["NewFancyEvent", 1], "unknown_event"),
        ({"type": "NewFancyEvent"}, "unknown_event"),
        (["BlockStored"], "broken_event"),
        ({"type": "BlockStored"}, "broken_event"),
        ({"block_hashes": [1]}, "broken_event"),
        ([], "broken_event"),
        (7, "broken_event"),
        ("BlockStored", "broken_event"),
        ([["BlockStored"], [1]], "broken_event"),
        (["BlockStored", ["text"], None, [5], 1], "broken_event"),
        (["BlockStored", [1.5], None, [5], 1], "broken_event"),
        (["BlockStored", [b""], None, [5], 1], "broken_event"),
        (["BlockStored", [b"x" * 65], None, [5], 1], "broken_event"),
        (["BlockStored", [1], None, [-5], 1], "broken_event"),
        (["BlockStored", [1], None, [2**32], 1], "broken_event"),
        (["BlockStored", [1], None, [5], -1], "broken_event"),
        (["BlockRemoved", [1], 5], "broken_event"),
    ],
)
def test_a_broken_event_is_left_out_alone(broken: object, reason: str) -> None:
    """The neighbours of an event that cannot be read are kept, and the reason is told."""
    decoded = decode(["BlockRemoved", [1]], broken, ["AllBlocksCleared"])
    assert decoded.rejected == (reason,)
    assert decoded.batch.events == (BlockRemoved([1]), AllBlocksCleared())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1.5, "events": []}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([1.5, {}]),
        msgspec.msgpack.encode([1.5, []]) + b"\0",
        # Lengths that are only claimed: 4 billion events, and 4 billion bytes.
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\xc6\xff\xff\xff\xff",
        b"\x92\x01" + b"\x91" * 100_000,
    ],
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    """The reason is told, whatever the bytes, and nothing else happens."""
    with pytest.raises(PayloadError) as caught:
        decode_batch(payload, MAX_BYTES)
    assert caught.value.reason == "broken_batch"


def test_a_payload_that_is_too_long_is_refused_unread() -> None:
    """The size is checked before anything is decoded."""
    payload = msgspec.msgpack.encode([1.5, []])
    assert decode_batch(payload, len(payload)).batch.events == ()
    with pytest.raises(PayloadError) as caught:
        decode_batch(payload, len(payload) - 1)
    assert caught.value.reason == "oversize"


def test_more_events_than_a_batch_may_have_are_refused() -> None:
    """A batch of a million tiny events is refused by its claimed length."""
    with pytest.raises(PayloadError):
        decode_batch(b"\x92\x01\xdd\x00\x01\x00\x01" + b"\xc0" * 65_537, MAX_BYTES)


@given(st.binary(max_size=300))
def test_random_bytes_do_no_harm(payload: bytes) -> None:
    """Any bytes are a batch or a PayloadError."""
    with suppress(PayloadError):
        decode_batch(payload, MAX_BYTES)


@given(st.sampled_from(VECTORS), st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_damaged_batches_do_no_harm(vector: dict[str, Any], at: int, byte: int, cut: bool) -> None:
    """A real batch with one byte changed, or cut off, is a batch or a PayloadError."""
    payload = bytearray.fromhex(vector["hex"])
    at %= len(payload)
    payload[at:] = b"" if cut else bytes([byte]) + payload[at + 1 :]
    with suppress(PayloadError):
        decode_batch(bytes(payload), MAX_BYTES)


@given(st.lists(tagged | json_like, max_size=5))
def test_every_event_is_read_or_rejected(events: list[object]) -> None:
    """No event is lost without a reason, whatever its fields hold."""
    decoded = decode(*events)
    assert len(decoded.batch.events) + len(decoded.rejected) == len(events)


def test_llmds_vectors_lose_nothing_that_we_can_read() -> None:
    """Batches that llm-d drops for one event, two elements or a small integer hash are read here."""
    kept = {
        "one-bad-event-drops-whole-batch": 1,
        "batch-two-fields-no-dp-rank": 1,
        "hash-encoded-as-uint8": 1,
        "hash-encoded-as-negfixint": 1,
        "extra-trailing-fields-ignored": 1,
        "batch-ts-int": 1,
    }
    for name, events in kept.items():
        payload = bytes.fromhex(LLMD_VECTORS[name]["messages"][0]["payload_hex"])
        assert len(decode_batch(payload, MAX_BYTES).batch.events) == events, name
