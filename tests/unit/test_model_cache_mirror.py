"""The mirror of what an engine announced: told again as events it gives the same content."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.cache_mirror import CacheMirror
from model_server.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from model_server.snapshot import Snapshot

SIZE = 2


def stored(hashes: list[int], parent: int | None = None, medium: str = "GPU", **fields: Any) -> BlockStored:
    """A run whose tokens follow from its hashes."""
    tokens = [token for block_hash in hashes for token in (block_hash, block_hash + 1)]
    settings = {"lora_id": None, "lora_name": None, "group_idx": 0, **fields}
    return BlockStored(hashes, parent, tokens, SIZE, medium=medium, **settings)


def copies(events: list[KVEvent]) -> Counter[tuple[object, ...]]:
    """Copies of each block with its content, by plain counting."""
    content: dict[tuple[object, ...], tuple[object, ...]] = {}
    held: Counter[tuple[object, ...]] = Counter()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            held.clear()
            content.clear()
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                name = (event.group_idx, block_hash)
                if held[name, event.medium]:
                    held[name, event.medium] -= 1
                if not any(count for (other, _), count in held.items() if other == name):
                    content.pop(name, None)
        else:
            parent = event.parent_block_hash
            for position, block_hash in enumerate(event.block_hashes):
                name = (event.group_idx, block_hash)
                tokens = tuple(event.token_ids[position * SIZE : (position + 1) * SIZE])
                if tokens:
                    content.setdefault(name, (parent, tokens, event.lora_name))
                if name in content:
                    held[name, event.medium] += 1
                parent = block_hash
    return Counter({(name, medium, content[name]): n for (name, medium), n in held.items() if n})


def told_again(events: list[KVEvent]) -> list[BlockStored]:
    """What the mirror makes of them."""
    mirror = CacheMirror()
    mirror.apply(events)
    return list(mirror.events())


def test_chains_are_told_in_runs_with_their_copies() -> None:
    """One run for one chain, each further copy for itself, children first."""
    events = [stored([1, 2]), stored([3], 2), stored([1, 2, 3])]
    runs = told_again(events)
    assert [run.block_hashes for run in runs] == [[1, 2, 3], [3], [2], [1]]
    assert copies(list(runs)) == copies(events)


def test_a_parent_that_came_back_is_told_before_its_child() -> None:
    """The order of the announcements is not that of the chain."""
    events = [stored([1, 2]), BlockRemoved([1], "GPU", 0), stored([1])]
    assert [run.block_hashes for run in told_again(events)] == [[1, 2]]


def test_tiers_that_name_only_hashes_are_told_with_tokens() -> None:
    """A block that left device memory is still known by its content."""
    placeholder = BlockStored([1], None, [], 0, lora_id=None, medium="CPU", lora_name=None, group_idx=0)
    unknown = BlockStored([9], None, [], 0, lora_id=None, medium="CPU", lora_name=None, group_idx=0)
    (run,) = told_again([stored([1]), placeholder, unknown, BlockRemoved([1], "GPU", 0)])
    assert (run.block_hashes, run.medium, list(run.token_ids)) == ([1], "CPU", [1, 2])


def test_runs_with_fewer_hashes_than_blocks_keep_their_span() -> None:
    """A sliding-window group's hashes are told with the tokens of the whole run."""
    event = BlockStored([7], 5, [1, 2, 3, 4], SIZE, lora_id=None, medium="GPU", lora_name=None, group_idx=1)
    (run,) = told_again([event])
    assert (run.parent_block_hash, list(run.token_ids), run.group_idx) == (5, [1, 2, 3, 4], 1)


def test_adapters_and_extra_keys_are_kept_apart() -> None:
    """Runs of two adapters are never joined, and extra keys stay with their blocks."""
    lora = {"lora_id": 1, "lora_name": "sql"}
    first, second = told_again([stored([1]), stored([2, 3], 1, extra_keys=[["a"], None], **lora)])
    assert (first.lora_name, first.extra_keys) == (None, None)
    assert (second.lora_name, second.extra_keys) == ("sql", [["a"], None])


_RUNS = st.builds(
    stored,
    st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True),
    st.none() | st.integers(1, 12),
    st.sampled_from(["GPU", "CPU"]),
    group_idx=st.sampled_from([None, 0, 1]),
)
_REMOVALS = st.builds(
    BlockRemoved,
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.sampled_from(["GPU", "CPU"]),
    st.sampled_from([None, 0, 1]),
)


@given(st.lists(st.one_of(_RUNS, _RUNS, _REMOVALS, st.builds(AllBlocksCleared)), max_size=30))
@settings(deadline=None, max_examples=300)
def test_whatever_was_announced_is_told_again(events: list[KVEvent]) -> None:
    """Copies, contents, tiers and groups are the same, and telling it again changes nothing more."""
    again: list[KVEvent] = list(told_again(events))
    assert copies(again) == copies(events)
    assert copies(list(told_again(again))) == copies(events)


def test_a_copy_of_the_mirror_stays_as_it_was() -> None:
    """What happens while a snapshot is sent is not in it."""
    mirror = CacheMirror()
    mirror.apply([stored([1, 2]), stored([1])])
    taken = mirror.copy()
    mirror.apply([BlockRemoved([1], "GPU", 0), AllBlocksCleared()])
    assert (taken.copies(), mirror.copies()) == (3, 0)


def test_the_body_is_one_map() -> None:
    """The pieces are one msgpack map, whose batches are payloads of the stream."""
    mirror = CacheMirror()
    mirror.apply([stored([number]) for number in range(2000)])
    body = b"".join(Snapshot("abc", 7, SIZE, 3, mirror).pieces())
    told = msgspec.msgpack.decode(body)
    batches = [msgspec.msgpack.decode(payload, type=KVEventBatch) for payload in told.pop("batches")]
    assert told == {"schema": 1, "boot_id": "abc", "sequence": 7, "block_size": SIZE, "blocks": 2000}
    assert len(batches) == 4
    assert {batch.data_parallel_rank for batch in batches} == {3}
    assert sum(len(event.block_hashes) for batch in batches for event in batch.events) == 2000
