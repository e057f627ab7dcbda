"""Payloads of events: plain, unusual and damaged ones, in every form that msgpack has."""

from __future__ import annotations

import random
import struct
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from indexer.wire import columns as rows
from indexer.wire.events import BlockStored

# Kernels are compiled during a test's first example, and the machine may be busy.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
STORED_NAMES = BlockStored.__struct_fields__[:11]

# One event with every field, and with some unknown ones.
PLAIN_MAP = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, -200, b"\x01" * 32],
    "parent_block_hash": -(2**63),
    "token_ids": [0, 127, 128, 65_535, 65_536, 2**32 - 1],
    "block_size": 2,
    "lora_id": 3,
    "medium": "CPU_PINNED",
    "lora_name": "sql",
    "extra_keys": [None, None, None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 64,
    "locality": "LOCAL",
    "ownership": {"owner": ["x"]},
    "session_id": "s",
}
PLAIN_ARRAY = ["BlockStored", *list(PLAIN_MAP.values())[1:12], "more", {"new": []}]


def packed(value: object, rng: random.Random) -> bytes:
    """Return msgpack of a value, with numbers and lengths in any valid form."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case int():
            return _packed_number(value, rng)
        case str():
            text = value.encode()
            return _head(len(text), rng, (0xA0, 32), {1: 0xD9, 2: 0xDA, 4: 0xDB}) + text
        case bytes():
            return _head(len(value), rng, (0, 0), {1: 0xC4, 2: 0xC5, 4: 0xC6}) + value
        case list():
            head = _head(len(value), rng, (0x90, 16), {2: 0xDC, 4: 0xDD})
            return head + b"".join(packed(item, rng) for item in value)
        case dict():
            head = _head(len(value), rng, (0x80, 16), {2: 0xDE, 4: 0xDF})
            return head + b"".join(packed(name, rng) + packed(item, rng) for name, item in value.items())
    raise TypeError(value)


def _packed_number(value: int, rng: random.Random) -> bytes:
    forms = [bytes([value % 256])] if -32 <= value < 128 else []
    for power, letter in enumerate("BHIQ"):
        bits = 8 << power
        if 0 <= value < 1 << bits:
            forms.append(bytes([0xCC + power]) + struct.pack(f">{letter}", value))
        if -(1 << bits - 1) <= value < 1 << bits - 1:
            forms.append(bytes([0xD0 + power]) + struct.pack(f">{letter.lower()}", value))
    return rng.choice(forms)


def _head(length: int, rng: random.Random, short: tuple[int, int], long: dict[int, int]) -> bytes:
    first, shorter_than = short
    forms = [bytes([first + length])] if length < shorter_than else []
    forms += [bytes([byte]) + length.to_bytes(width) for width, byte in long.items() if length < 256**width]
    return rng.choice(forms)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
engine_hash = st.integers(-(2**63), 2**64 - 1) | st.integers(-40, 300) | st.binary(min_size=1, max_size=64)
plain_fields: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": st.lists(engine_hash, max_size=3),
    "parent_block_hash": st.none() | engine_hash,
    "token_ids": st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=20),
    "block_size": st.integers(0, 300),
    "lora_id": st.none() | st.integers(0, 5),
    "medium": st.none() | st.sampled_from(rows.MEDIA),
    "lora_name": st.none() | st.sampled_from(["", "sql", "a" * 300]),
    "extra_keys": st.none() | st.lists(st.none() | st.just(["sql"]), max_size=3),
    "group_idx": st.none() | st.integers(0, 3),
    "kv_cache_spec_kind": st.none() | st.sampled_from(rows.SPEC_KINDS),
    "kv_cache_spec_sliding_window": st.none() | st.integers(0, 10_000),
    "cache_salt": st.none(),
}
odd_fields: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(plain_fields, anything),
    "block_hashes": st.lists(engine_hash | anything | st.just(b""), max_size=3),
    "token_ids": st.lists(st.integers(-2, 2**33) | anything, max_size=3),
    "block_size": st.sampled_from([-1, 2**21, 2**21 + 1, 2**63, 1.0]),
    "lora_id": st.sampled_from([-1, 2**63 - 1, 2**63, 0.0]),
    "medium": st.sampled_from(["gpu", "TAPE", b"GPU", "GPU\0"]),
    "lora_name": st.text(max_size=5) | st.just({"cache_salt": "s"}),
    "extra_keys": st.lists(st.none() | st.lists(anything, max_size=2), max_size=3),
    "group_idx": st.sampled_from([-1, 65_535, 65_536, 2**64 - 1]),
    "kv_cache_spec_kind": st.text(max_size=5),
    "kv_cache_spec_sliding_window": st.sampled_from([-1, 2**31 - 1, 2**31]),
    "cache_salt": st.text(max_size=3),
}
REMOVED_NAMES = ("block_hashes", "medium", "group_idx")
tags = st.sampled_from(["BlockStored"] * 4 + ["BlockRemoved"] * 3 + ["AllBlocksCleared", "OTHER", "New"])


@st.composite
def events(draw: st.DrawFn) -> object:
    """Generate events of any kind in either layout, nearly all plain, some with unusual fields."""
    tag = draw(tags)
    odd = draw(st.sets(st.sampled_from(sorted(plain_fields)), max_size=2)) if draw(st.booleans()) else set()
    fields = {name: draw((odd_fields if name in odd else plain)[name]) for name, plain in ALL_FIELDS}
    if draw(st.booleans()):
        names = REMOVED_NAMES if tag == "BlockRemoved" else STORED_NAMES
        count = draw(st.integers(0, len(names)) | st.just(len(names)))
        more = draw(st.lists(anything, max_size=2)) if count == len(names) else []
        return [tag, *(fields[name] for name in names[:count]), *more]
    names = draw(st.permutations(["type", *(REMOVED_NAMES if tag == "BlockRemoved" else fields)]))
    left_out = draw(st.sets(st.sampled_from(names), max_size=3))
    event = {name: ({"type": tag} | fields)[name] for name in names if name not in left_out}
    return event | draw(st.dictionaries(st.text(max_size=3) | st.just("locality"), anything, max_size=2))


ALL_FIELDS = [(name, plain_fields) for name in plain_fields]


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Generate batches, nearly always well-formed."""
    ts = draw(st.floats() | st.floats(width=32) | st.integers(-(2**63), 2**64 - 1))
    tail = draw(
        st.just([])
        | st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=1)
        | st.lists(anything, max_size=3)
    )
    batch: list[object] = [ts, draw(st.lists(events() | anything, max_size=4)), *tail]
    return packed(batch, random.Random(draw(st.integers(0, 2**32))))


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Generate a payload with bytes changed, inserted, removed, or truncated."""
    payload = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(payload) - 1)))
        match draw(st.sampled_from(["change", "insert", "delete", "cut"])):
            case "change":
                payload[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                payload[at:at] = draw(st.binary(min_size=1, max_size=5))
            case "delete":
                del payload[at : at + draw(st.integers(1, 5))]
            case "cut":
                del payload[at:]
    return bytes(payload)
