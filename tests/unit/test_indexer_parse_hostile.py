"""The parser's kernels under hostile bytes: compiled code checks no bounds, so plain Python does it here."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import event_rows as rows
from indexer.parse import EventParser, Parsed
from tests.unit.indexer_support import read_json
from tests.unit.parse_support import (
    MAX_BYTES,
    PLAIN_ARRAY,
    PLAIN_KERNELS,
    PLAIN_MAP,
    check,
    damaged,
    guarded,
    payloads,
    unhurried,
)

VECTORS = [bytes.fromhex(vector["hex"]) for vector in read_json("kv_event_vectors.json.gz")]
hostile = (
    st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda tail: b"\x93\x01\x91" + tail)
    | st.sampled_from(
        [b"\x9c\xabBlockStored", b"\x8c\xa4type\xabBlockStored", b"\x94\xacBlockRemoved"]
    ).flatmap(lambda head: st.binary(max_size=60).map(lambda tail: b"\x92\x01\x91" + head + tail))
    | damaged(st.integers(0, len(VECTORS) - 1).map(lambda place: VECTORS[place]))
    | damaged(payloads())
    | payloads()
)


def parse_guarded(payload: bytes) -> Parsed:
    """Parses in plain Python, with arrays of exactly the size that the kernel asks for."""
    data = guarded(np.frombuffer(payload, np.uint8))
    batches = guarded(np.zeros((1, rows.BATCH_COLUMNS), np.int64))
    hashes, tokens = guarded(np.zeros(len(data), np.uint64)), guarded(np.zeros(len(data), np.uint32))
    ends = guarded(np.array([len(data)], np.int64))
    found = guarded(np.zeros(rows.FOUND, np.int64))
    needed = 0
    with np.errstate(over="ignore"):
        while True:
            events = guarded(np.zeros((needed, rows.EVENT_COLUMNS), np.int64))
            read = PLAIN_KERNELS["parse_payloads"](data, ends, batches, events, hashes, tokens, found)
            if read <= needed:
                break
            needed = read
    plain = (array.view(np.ndarray) for array in (data, batches, events[:read], hashes, tokens))
    *kinds, broken = found.tolist()
    return Parsed(*plain, kinds, not broken)


@settings(unhurried, max_examples=60)
@given(hostile)
def test_no_bytes_make_the_kernels_read_or_write_outside_their_arrays(payload: bytes) -> None:
    """Interpreted, every place is checked; what comes out is what the compiled kernels and decode tell."""
    interpreted = parse_guarded(payload)
    compiled = EventParser(MAX_BYTES).parse([payload])
    check(interpreted, [payload])
    np.testing.assert_array_equal(interpreted.batches, compiled.batches)
    np.testing.assert_array_equal(interpreted.events, compiled.events)
    for event in compiled.events[compiled.events[:, rows.KIND] != rows.OTHER]:
        for array, other, start, count in (
            (interpreted.hashes, compiled.hashes, rows.HASH_START, rows.HASH_COUNT),
            (interpreted.tokens, compiled.tokens, rows.TOKEN_START, rows.TOKEN_COUNT),
        ):
            part = slice(event[start], event[start] + event[count])
            np.testing.assert_array_equal(array[part], other[part])


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode([1.5, [PLAIN_MAP], 300]),
        msgspec.msgpack.encode([1.5, [PLAIN_ARRAY, ["BlockRemoved", [b"x" * 16]]], None, "more"]),
        b"\x93\xca\x3f\xc0\x00\x00\x91\x91\xb0AllBlocksCleared\xd3" + bytes(8),
    ],
    ids=["map", "arrays", "float32"],
)
def test_no_payload_is_read_beyond_where_it_is_cut(payload: bytes) -> None:
    """Each beginning of a payload, alone and with others behind it, is a broken batch."""
    cuts = [payload[:end] for end in range(len(payload))]
    for cut in cuts:
        assert parse_guarded(cut).batches[:, rows.STATUS].tolist() == [rows.BROKEN_BATCH]
    joined = EventParser(MAX_BYTES).parse(cuts)
    check(joined, cuts)
    assert set(joined.batches[:, rows.STATUS].tolist()) == {rows.BROKEN_BATCH}


@unhurried
@given(st.lists(hostile, max_size=4))
def test_a_payload_is_read_alike_whatever_lies_beside_it(batch: list[bytes]) -> None:
    """Payloads are joined for parsing; no length in one of them reaches into the next."""
    check(EventParser(MAX_BYTES).parse(batch), batch)
