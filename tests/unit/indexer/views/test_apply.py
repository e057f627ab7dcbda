"""Pod view: block identity, copies, block sizes and groups of one pod epoch."""

from __future__ import annotations

import pytest

from indexer.wire.events import AllBlocksCleared, BlockRemoved
from tests.support.indexer.views import OnePod, stored

TOKENS = list(range(100, 124))
ONE, TWO, THREE = TOKENS[:4], TOKENS[4:8], TOKENS[8:12]


@pytest.fixture
def pod() -> OnePod:
    """Return a pod with blocks of 4 tokens in engine and index."""
    return OnePod()


def test_runs_are_chained_by_the_engines_hashes(pod: OnePod) -> None:
    """A run continues the block of its parent hash, and keys are reported parents first."""
    first = pod.apply(stored([1, 2], ONE + TWO))
    second = pod.apply(stored([3], THREE, parent=2))
    assert pod.cached(TOKENS) == 3
    keys = pod.hasher.chain(pod.hasher.root("m"), ONE + TWO + THREE)
    assert [*first.stored[0], *second.stored[0]] == keys.tolist()


def test_a_removed_block_ends_the_prefix(pod: OnePod) -> None:
    """Blocks after a removed one stay indexed and count again once it is stored again."""
    pod.apply(stored([1, 2, 3], TOKENS[:12]), BlockRemoved([2]))
    assert pod.cached(TOKENS) == 1
    pod.apply(stored([2], TWO, parent=1))
    assert pod.cached(TOKENS) == 3


def test_two_physical_copies_need_two_removals(pod: OnePod) -> None:
    """A block computed twice is held until both copies are removed; first and last removal are distinct."""
    pod.apply(stored([1], ONE), stored([1], ONE))
    assert pod.apply(BlockRemoved([1])).removals == {"copy": 1}
    assert pod.cached(TOKENS) == 1
    assert pod.apply(BlockRemoved([1])).removals == {"last": 1}
    assert pod.cached(TOKENS) == 0


@pytest.mark.parametrize("hashes", [[-7, 2**64 - 7], [b"\x01" * 32, b"\x02" * 32], [0, 1]])
def test_any_form_of_hash_is_a_handle(pod: OnePod, hashes: list[int | bytes]) -> None:
    """Signed and unsigned integers, 0 and byte strings all work as block hashes."""
    pod.apply(stored(hashes[:1], ONE), stored(hashes[1:], TWO, parent=hashes[0]))
    assert pod.cached(TOKENS) == 2
    pod.apply(BlockRemoved(hashes[1:]))
    assert pod.cached(TOKENS) == 1


def test_adapters_and_salts_do_not_share_blocks(pod: OnePod) -> None:
    """Equal tokens with different adapters or salts have different blocks."""
    pod.apply(
        stored([1], ONE),
        stored([2], ONE, lora_id=1, lora_name="sql", extra_keys=[["sql"]]),
        stored([3, 4], ONE + TWO, extra_keys=[["tenant"], None]),
        stored([5], ONE, lora_id=1, lora_name="sql", extra_keys=[["sql", "tenant"]]),
    )
    assert pod.index.stats().blocks == 5
    pod.apply(BlockRemoved([1]))
    assert pod.cached(ONE) == 0
    assert pod.cached(ONE, lora="sql") == 1
    assert pod.cached(ONE + TWO, salt="tenant") == 2
    assert pod.cached(ONE, lora="sql", salt="tenant") == 1
    assert pod.cached(ONE, lora="tenant", salt="sql") == 0


def test_a_salt_may_be_named_like_the_adapter(pod: OnePod) -> None:
    """Only the first of two equal texts in an entry is the adapter's name."""
    pod.apply(stored([1], ONE, lora_id=1, lora_name="x", extra_keys=[["x", "x"]]))
    assert pod.cached(ONE, lora="x", salt="x") == 1
    assert pod.cached(ONE, lora="x") == 0


def test_sglangs_salt_is_the_events(pod: OnePod) -> None:
    """A salt in the event's own field, as SGLang sends it, separates blocks."""
    pod.apply(stored([1], ONE, cache_salt="tenant"))
    assert pod.cached(ONE, salt="tenant") == 1
    assert pod.cached(ONE) == 0


def test_images_do_not_share_blocks_with_text_or_each_other(pod: OnePod) -> None:
    """Images with equal placeholder tokens differ by identifier, offset and digest."""
    entries = [["a", 0]], [["b", 0]], [["a", 1]], [["a", 0], ["b", 2]], [b"a"], None
    for number, entry in enumerate(entries):
        pod.apply(stored([number + 1], ONE, extra_keys=[entry]))
    assert pod.index.stats().blocks == len(entries)
    assert pod.cached(ONE) == 1


@pytest.mark.parametrize(
    "extra_keys",
    [[[1.5]], [[["a"]]], [[{"a": 1}]], [[["a", 2**40]]], [[["a", -1]]], [[["a", True]]], [None, None], []],
)
def test_an_extra_key_that_cannot_be_read_is_not_guessed(pod: OnePod, extra_keys: list[object]) -> None:
    """A block with an unreadable extra key is skipped, because a false hit is worse than a miss."""
    assert pod.apply(stored([1], ONE, extra_keys=extra_keys)).skipped == {("BlockStored", "extra_keys"): 1}
    assert pod.index.stats().blocks == 0


def test_an_adapter_without_a_name_is_left_out(pod: OnePod) -> None:
    """An event with only an adapter number is skipped rather than stored for the base model."""
    assert pod.apply(stored([1], ONE, lora_id=3)).skipped == {("BlockStored", "lora_without_name"): 1}
    assert pod.cached(ONE) == 0


def test_longer_engine_blocks_are_split() -> None:
    """An engine block of 64 tokens is 4 index blocks of 16, stored, continued and removed together."""
    pod = OnePod(block_tokens=16)
    tokens = list(range(160))
    pod.apply(stored([1], tokens[:64], block_size=64), stored([2], tokens[64:128], parent=1, block_size=64))
    assert pod.cached(tokens) == 8
    assert pod.cached(tokens[:40]) == 2
    pod.apply(BlockRemoved([2]))
    assert pod.cached(tokens) == 4
    pod.apply(BlockRemoved([1]))
    assert pod.index.stats().blocks == 0


def test_an_image_in_a_long_engine_block_reaches_the_parts_behind_its_start() -> None:
    """In a split engine block, index blocks before an image equal those of plain text."""
    pod = OnePod(block_tokens=4)
    pod.apply(stored([1], TOKENS[:12], block_size=12, extra_keys=[[["image", 5]]]))
    assert pod.cached(TOKENS) == 1


@pytest.mark.parametrize("block_size", [3, 6, 5])
def test_unsupported_block_sizes_are_counted(pod: OnePod, block_size: int) -> None:
    """Engine blocks that are neither a divisor nor a multiple of index blocks are counted and skipped."""
    event = stored([1, 2], list(range(2 * block_size)), block_size=block_size)
    assert pod.apply(event).skipped == {("BlockStored", "block_size"): 1}
    assert pod.index.stats().blocks == 0


@pytest.mark.parametrize("hashes", [[1], [1, 2, 3]])
def test_hashes_that_do_not_cover_the_tokens_are_counted(pod: OnePod, hashes: list[int | bytes]) -> None:
    """A run whose hashes do not match its number of blocks is counted and skipped."""
    assert pod.apply(stored(hashes, ONE + TWO)).skipped == {("BlockStored", "token_span"): 1}
    assert pod.index.stats().blocks == 0


def test_a_store_without_hashes_is_ignored(pod: OnePod) -> None:
    """A run of which a sliding-window group keeps no block is not an error."""
    assert not pod.apply(stored([], ONE, group_idx=0, kv_cache_spec_kind="sliding_window")).skipped
    assert not pod.apply(stored([], ONE)).skipped


def test_media_are_tiers(pod: OnePod) -> None:
    """Device, host and unknown media have their own tiers; no medium means device memory."""
    for number, medium in enumerate([None, "GPU", "CPU", "CPU_PINNED", "cpu", "DISK"]):
        pod.apply(stored([number + 1], TOKENS[number * 4 :][:4], parent=number or None, medium=medium))
    assert pod.tiers(TOKENS) == {"gpu": 2, "cpu": 3, "disk": 1}


def test_a_copy_in_host_memory_is_known_by_its_hash(pod: OnePod) -> None:
    """A store without tokens is resolved by the hash's earlier store, also after that copy was removed."""
    host = {"medium": "CPU", "block_size": 0}
    pod.apply(stored([1, 2], ONE + TWO, medium="GPU"), stored([1], [], **host), BlockRemoved([1, 2], "GPU"))
    assert pod.tiers(TOKENS) == {"cpu": 1}
    pod.apply(stored([2], [], **host))
    assert pod.tiers(TOKENS) == {"cpu": 2}
    pod.apply(BlockRemoved([1, 2], "CPU"))
    assert pod.cached(TOKENS) == 0
    assert pod.apply(stored([9], [], **host)).skipped == {("BlockStored", "unknown_hash"): 1}


def test_a_parent_of_0_is_none_only_while_no_block_is_named_0(pod: OnePod) -> None:
    """Parent 0 means no parent (llm-d's simulator) unless the engine has stored a block with hash 0."""
    pod.apply(stored([5], ONE, parent=0))
    assert pod.cached(TOKENS) == 1
    counting = OnePod()
    counting.apply(stored([0], ONE), stored([1], TWO, parent=0))
    assert counting.cached(TOKENS) == 2
    counting.apply(AllBlocksCleared(), stored([1], TWO, parent=0))
    assert counting.cached(TWO) == 0


def test_a_reused_hash_replaces_its_block(pod: OnePod) -> None:
    """An engine that reuses a hash for other tokens replaces the block, with all its copies."""
    pod.apply(stored([1], ONE), stored([1], ONE))
    assert pod.apply(stored([1], TWO)).skipped == {("BlockStored", "hash_reused"): 1}
    assert (pod.cached(ONE), pod.cached(TWO)) == (0, 1)
    pod.apply(BlockRemoved([1]))
    assert pod.index.stats().blocks == 0


def test_a_cleared_cache_is_empty_in_all_tiers(pod: OnePod) -> None:
    """AllBlocksCleared removes blocks, copies and orphans, and is reported in the outcome."""
    pod.apply(stored([1], ONE), stored([1], [], medium="CPU", block_size=0), stored([8], TWO, parent=7))
    assert pod.view.orphans == 1
    assert pod.apply(AllBlocksCleared()).emptied
    assert (pod.index.stats().blocks, pod.view.orphans) == (0, 0)
    assert pod.apply(BlockRemoved([1])).skipped == {("BlockRemoved", "unknown_hash"): 1}
