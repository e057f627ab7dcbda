"""Decoding of every layout that engines publish, and rejection of anything else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import PayloadError
from indexer.wire.decode import decode_event
from indexer.wire.events import AllBlocksCleared, BlockInactive, BlockRemoved, BlockStored
from tests.support.indexer.decoding import Decoded, decode_batch
from tests.support.indexer.views import read_json

VECTORS = read_json("kv_event_vectors.json.gz")
LLMD_VECTORS = read_json("llmd_event_vectors.json.gz")
# The last event of these is invalid; llm-d wraps a negative token and rejects the others.
LLMD_REFUSED = {
    "one-bad-event-drops-whole-batch": "unknown_event",
    "event-as-map-error": "broken_event",
    "token-negative-wraps": "broken_event",
    "hash-encoded-as-str": "broken_event",
    "hash-encoded-as-float": "broken_event",
}
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
# Default of a field that an event leaves out; None for all others.
DEFAULTS = {"token_ids": [], "block_size": 0}

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
    """Decode a batch of these events."""
    return decode_batch(msgspec.msgpack.encode([1.5, list(events), *tail]), MAX_BYTES)


def with_bytes(value: Any) -> Any:
    """Return a vector's value with its byte strings and large numbers restored."""
    if isinstance(value, dict):
        if value.keys() & {"$bytes", "bytes_hex"}:
            return bytes.fromhex(value.get("$bytes") or value["bytes_hex"])
        if "u64" in value:
            return int(value["u64"])
        return {name: with_bytes(item) for name, item in value.items()}
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


def expected_fields(event: Any) -> dict[str, Any]:
    """Return the fields of a vector's event, in either layout, by name."""
    if isinstance(event, dict):
        return event
    return {"type": event[0], **dict(zip(ARRAY_FIELDS[event[0]], event[1:], strict=False))}


def check_decoded(decoded: Decoded, batch: list[Any]) -> None:
    """Check that the decoded events equal the vector's, with no event missing and no other field."""
    ts, events, *rank = batch
    assert decoded.batch.ts == ts
    assert decoded.batch.data_parallel_rank == (rank[0] if rank else None)
    for event, told in zip(decoded.batch.events, map(expected_fields, events), strict=True):
        assert type(event).__name__ == told["type"]
        for name in event.__struct_fields__:
            assert getattr(event, name) == told.get(name, DEFAULTS.get(name)), name


@pytest.mark.parametrize(
    "vector", VECTORS, ids=lambda vector: f"{vector['source']}-{vector['version']}-{vector['name']}"
)
def test_what_engines_publish_is_read_in_full(vector: dict[str, Any]) -> None:
    """Vectors of seven engine releases decode to their events with every known field."""
    decoded = decode_batch(bytes.fromhex(vector["hex"]), MAX_BYTES)
    assert decoded.rejected == ()
    check_decoded(decoded, with_bytes(vector["generic"]))


def test_elements_behind_the_known_ones_are_ignored() -> None:
    """Additional elements of batches and arrays, and unknown map fields, are ignored."""
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
    """Small, large and negative numbers and byte strings are valid hashes."""
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
        (["BlockRemoved", [1], None, -1], "broken_event"),
        (["BlockRemoved", [1], None, 65_536], "broken_event"),
        ({"type": "BlockStored", "block_hashes": [1], "kv_cache_spec_sliding_window": -1}, "broken_event"),
        ({"type": "BlockStored", "block_hashes": [1.0]}, "broken_event"),
        (["BlockStored", [1], None, [5], 1, None, None, {"cache_salt": 5}], "broken_event"),
    ],
)
def test_a_broken_event_is_left_out_alone(broken: object, reason: str) -> None:
    """A malformed event is skipped with a reason; the other events of its batch are kept."""
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
        # Declared lengths without content: 4 billion events, and 4 billion bytes.
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\xc6\xff\xff\xff\xff",
        b"\x92\x01" + b"\x91" * 100_000,
    ],
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    """A malformed payload is rejected with a reason."""
    with pytest.raises(PayloadError) as caught:
        decode_batch(payload, MAX_BYTES)
    assert caught.value.reason == "broken_batch"


def test_a_payload_that_is_too_long_is_refused_unread() -> None:
    """The size is checked before decoding."""
    payload = msgspec.msgpack.encode([1.5, []])
    assert decode_batch(payload, len(payload)).batch.events == ()
    with pytest.raises(PayloadError) as caught:
        decode_batch(payload, len(payload) - 1)
    assert caught.value.reason == "oversize"


def test_more_events_than_a_batch_may_have_are_refused() -> None:
    """A batch of a million small events is rejected by its declared length."""
    with pytest.raises(PayloadError):
        decode_batch(b"\x92\x01\xdd\x00\x01\x00\x01" + b"\xc0" * 65_537, MAX_BYTES)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_do_no_harm(payload: bytes) -> None:
    """Random bytes are a batch or a PayloadError."""
    with suppress(PayloadError):
        decode_batch(payload, MAX_BYTES)


@settings(deadline=None)
@given(st.sampled_from(VECTORS), st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_damaged_batches_do_no_harm(vector: dict[str, Any], at: int, byte: int, cut: bool) -> None:
    """A real batch that was truncated or had one byte changed is a batch or a PayloadError."""
    payload = bytearray.fromhex(vector["hex"])
    at %= len(payload)
    payload[at:] = b"" if cut else bytes([byte]) + payload[at + 1 :]
    with suppress(PayloadError):
        decode_batch(bytes(payload), MAX_BYTES)


@settings(deadline=None)
@given(st.lists(tagged | json_like, max_size=5))
def test_every_event_is_read_or_rejected(events: list[object]) -> None:
    """Each event is decoded or rejected with a reason, whatever its fields."""
    decoded = decode(*events)
    assert len(decoded.batch.events) + len(decoded.rejected) == len(events)


def test_the_metadata_of_sglangs_last_arrays_is_no_adapter_name() -> None:
    """In the place of vLLM's adapter name SGLang's arrays may have a map with the prompt's salt."""
    fields = ["BlockStored", [-7], None, [5], 1, None, "CPU_PINNED"]
    for metadata, salt in (({"cache_salt": "s", "session_id": "q"}, "s"), ({"session_id": "q"}, None)):
        expected = BlockStored([-7], None, [5], 1, medium="CPU_PINNED", cache_salt=salt)
        assert decode([*fields, metadata]).batch.events == (expected,)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockInactive", "block_hashes": [1, 2], "medium": "GPU"},
        ["BlockInactive", [1, 2], "GPU"],
    ],
)
def test_inactive_blocks_are_read(event: object) -> None:
    """A notice that no request uses some blocks is an event of its own, in both layouts."""
    assert decode(event).batch.events == (BlockInactive([1, 2], "GPU"),)


def test_one_event_is_read_on_its_own() -> None:
    """One event's bytes decode to the event, or raise the reason and the error."""
    assert decode_event(msgspec.msgpack.encode(["BlockRemoved", [1]])) == BlockRemoved([1])
    for broken, reason, message in (
        (["BlockRemoved", [1.5]], "broken_event", "float"),
        (["New"], "unknown_event", "New"),
        ({"type": "New"}, "unknown_event", "New"),
    ):
        with pytest.raises(PayloadError, match=message) as caught:
            decode_event(msgspec.msgpack.encode(broken))
        assert caught.value.reason == reason
    for raw in (b"", b"\xc1", b"\x93", b"\x81\xa4type", b"\x91" * 100_000):
        with pytest.raises(PayloadError) as caught:
            decode_event(raw)
        assert caught.value.reason == "broken_event"


@pytest.mark.parametrize("vector", LLMD_VECTORS, ids=lambda vector: vector["id"])
def test_llmds_vectors_are_read_or_refused_for_a_reason(vector: dict[str, Any]) -> None:
    """Events that llm-d reads are decoded here, and so are those that it drops for their form."""
    for message in vector["messages"]:
        payload = bytes.fromhex(message["payload_hex"])
        if vector["id"] == "batch-as-map-error":
            with pytest.raises(PayloadError):
                decode_batch(payload, MAX_BYTES)
            continue
        decoded = decode_batch(payload, MAX_BYTES)
        told = with_bytes(message["decoded"])
        if isinstance(told, bytes):
            told = msgspec.msgpack.decode(told)
        refused = LLMD_REFUSED.get(vector["id"])
        assert decoded.rejected == ((refused,) if refused else ())
        check_decoded(decoded, [told[0], told[1][: -1 if refused else None], *told[2:]])
