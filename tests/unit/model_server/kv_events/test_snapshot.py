"""Snapshots: the events of a snapshot rebuild the contents of both tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.kv_events.events import BlockContent, BlockStored, KVEventBatch, KVEventBuilder
from model_server.kv_events.hashing import event_hash
from model_server.kv_events.publisher import Snapshot
from model_server.shapes.shape import kv_groups
from tests.support.depth import examples

SIZE = 2
ANNOUNCER = KVEventBuilder(kv_groups((None, 8)), SIZE)


def block(number: int, parent: int | None = None, group: int = 0, lora: str | None = None) -> BlockContent:
    """Return a block whose tokens derive from its number."""
    return BlockContent(
        group=group,
        block_hash=number.to_bytes(32, "big"),
        parent=None if parent is None else parent.to_bytes(32, "big"),
        token_ids=(number, number + 1),
        extra_keys=None if lora is None else (("lora", lora),),
        lora=None if lora is None else (1, lora),
    )


def chain(*numbers: int, **fields: object) -> list[BlockContent]:
    """Return consecutive blocks."""
    parents = (None, *numbers)
    return [block(number, parent, **fields) for number, parent in zip(numbers, parents, strict=False)]  # type: ignore[arg-type]


def snapshot_events(device: Sequence[BlockContent], host: Sequence[BlockContent] = ()) -> list[BlockStored]:
    """Return the events of a snapshot."""
    return list(Snapshot("abc", 7, ANNOUNCER, {"GPU": device, "CPU": host}).events())


def numbers_of(events: Sequence[BlockStored]) -> list[tuple[str | None, list[int]]]:
    """Return each event's medium and block numbers."""
    return [(event.medium, list(event.token_ids[::SIZE])) for event in events]


def copies(events: Sequence[BlockStored]) -> Counter[tuple[object, ...]]:
    """Count the copies of each block with its content."""
    held: Counter[tuple[object, ...]] = Counter()
    for event in events:
        parent = event.parent_block_hash
        for position, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[position * SIZE : (position + 1) * SIZE])
            held[event.medium, event.group_idx, block_hash, parent, tokens, event.lora_name] += 1
            parent = block_hash
    return held


def expected_copies(medium: str, contents: Sequence[BlockContent]) -> Counter[tuple[object, ...]]:
    """Count the copies of each block in a tier."""
    return Counter(
        (
            medium,
            content.group,
            event_hash(content.block_hash),
            None if content.parent is None else event_hash(content.parent),
            content.token_ids,
            None if content.lora is None else content.lora[1],
        )
        for content in contents
    )


def test_chains_are_runs_with_single_copies() -> None:
    """A chain is one run; further copies are single events, children first, in every tier."""
    events = snapshot_events([*chain(1, 2, 3), *chain(1, 2, 3)], chain(1, 2))
    single = [("GPU", [3]), ("GPU", [2]), ("CPU", [2]), ("GPU", [1]), ("CPU", [1])]
    assert numbers_of(events) == [("GPU", [1, 2, 3]), *single]


def test_parents_precede_children() -> None:
    """Parents precede children whatever the pool's order, even across tiers."""
    one, two, three = chain(1, 2, 3)
    assert numbers_of(snapshot_events([three, two], [one])) == [("CPU", [1]), ("GPU", [2, 3])]


def test_adapters_groups_and_extra_keys_are_kept_apart() -> None:
    """Runs never span two adapters or groups, and extra keys stay with their blocks."""
    plain, sql, window = snapshot_events([block(1), block(2, 1, lora="sql"), block(3, 2, group=1)])
    assert (plain.lora_name, plain.extra_keys) == (None, [None])
    assert (sql.lora_name, sql.extra_keys) == ("sql", [["sql"]])
    assert (window.group_idx, window.kv_cache_spec_sliding_window) == (1, 8)


_BLOCKS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0, 1])).map(
        lambda told: block(told[0], told[0] // 2 or None, told[1])
    ),
    max_size=30,
)


@given(device=_BLOCKS, host=_BLOCKS)
@settings(deadline=None, max_examples=examples(200))
def test_snapshot_has_all_cached_copies(device: list[BlockContent], host: list[BlockContent]) -> None:
    """The snapshot has the copies, contents, tiers and groups of both tiers."""
    assert copies(snapshot_events(device, host)) == expected_copies("GPU", device) + expected_copies(
        "CPU", host
    )


def test_the_body_is_one_map() -> None:
    """The body is one msgpack map whose batches are stream payloads."""
    held = {"GPU": [block(number) for number in range(2000)], "CPU": []}
    told = msgspec.msgpack.decode(Snapshot("abc", 7, ANNOUNCER, held).body())
    batches = [msgspec.msgpack.decode(payload, type=KVEventBatch) for payload in told.pop("batches")]
    assert told == {"schema": 1, "boot_id": "abc", "sequence": 7, "block_size": SIZE, "blocks": 2000}
    assert len(batches) == 4
    assert {batch.data_parallel_rank for batch in batches} == {0}
    assert sum(len(event.block_hashes) for batch in batches for event in batch.events) == 2000
