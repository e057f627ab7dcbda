"""Slot accounting of the host tier, and block copies."""

import pytest
import torch

from model_server.kv_cache.block_pool import BlockPool
from model_server.kv_cache.host_tier import TRANSFER_BYTES, HostBlock, HostTier, OffloadingManager
from model_server.kv_events.events import BlockContent, BlockRemoved, BlockStored, KVEvent, KVEventBuilder
from model_server.shapes.shape import single_group
from model_server.worker.block_copies import new_copies
from tests.support.model_server.engine import LateTransfer, Outputs, checking_engine, request, run_to_end
from tests.support.model_server.invariants import check_engine, check_host, check_pool

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def contents(count: int) -> list[BlockContent]:
    """Return a chain of blocks of 2 tokens."""
    digests = [None, *(bytes([number]) * 32 for number in range(1, count + 1))]
    return [
        BlockContent(0, digests[index + 1] or b"", digests[index], (index, index), None, None)
        for index in range(count)
    ]


def new_tier(slots: int) -> tuple[HostTier, list[KVEvent]]:
    """Return a host tier and the list that receives its events."""
    events: list[KVEvent] = []
    return HostTier(slots, KVEventBuilder(single_group(1), 2), events.append), events


class RecordedCopies:
    """Copies that record their calls, two blocks in a transfer; each transfer is done once awaited."""

    block_bytes = TRANSFER_BYTES // 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.fail_next = False

    def store(self, blocks: list[int], slots: list[int]) -> LateTransfer:
        """Record the blocks, or fail."""
        return self._start("store", blocks)

    def restore(self, slots: list[int], blocks: list[int]) -> LateTransfer:
        """Record the blocks, or fail."""
        return self._start("restore", blocks)

    def fence(self) -> None:
        """Record the call."""
        self.calls.append(("fence", []))

    def _start(self, name: str, blocks: list[int]) -> LateTransfer:
        if self.fail_next:
            self.fail_next = False
            raise torch.OutOfMemoryError("out of memory")
        self.calls.append((name, blocks))
        return LateTransfer(lambda: None, 1 << 30)


def new_offloading(blocks: int) -> tuple[OffloadingManager, RecordedCopies, list[BlockContent]]:
    """Return the two tiers around recorded copies, with as many free cached blocks as the pool has."""
    builder, copies = KVEventBuilder(single_group(1), 2), RecordedCopies()
    pool = BlockPool(blocks, builder)
    offloading = OffloadingManager(pool, HostTier(blocks, builder, pool.add_event), copies)
    chain, fresh = contents(blocks), pool.get_new_blocks(blocks)
    pool.cache_full_blocks(fresh, chain, computed=True)
    pool.free_blocks(fresh)
    return offloading, copies, chain


def restore_one(offloading: OffloadingManager, content: BlockContent) -> HostBlock:
    """Queue the restore of a stored block into a new block; return its source."""
    source = offloading.host_tier.get(content.key)
    assert source is not None
    source.pin_count += 1
    offloading.restore([(source, *offloading.block_pool.get_new_blocks(1))])
    return source


def test_stores_of_blocks_that_keep_their_content_start_two_at_a_time() -> None:
    """Only stores of evicted blocks start at once; the others follow as running ones end, two at a time."""
    offloading, copies, _ = new_offloading(9)
    for block in offloading.block_pool.blocks:
        offloading.store(block)
    offloading.start_transfers()
    assert copies.calls == [("store", [0, 1]), ("store", [2, 3])]
    offloading.block_pool.get_new_blocks(3)  # evicts the last blocks of the chain
    offloading.start_transfers()
    assert copies.calls[2:] == [("store", [6, 7]), ("store", [8, 4])]
    for _ in range(2):  # as in an engine that has nothing else to do
        assert offloading.wait_for_restore()
        offloading.poll_transfers()
    offloading.start_transfers()
    assert copies.calls[4:] == []
    assert offloading.wait_for_restore()
    offloading.poll_transfers()
    offloading.start_transfers()
    assert copies.calls[4:] == [("store", [5])]
    assert not offloading.wait_for_restore()
    offloading.wait_for_all()
    assert all(block.ready and not block.pin_count for block in offloading.host_tier.blocks.values())


def test_abandoned_restore_is_not_started() -> None:
    """A restore abandoned while queued is dropped and unpins its host blocks; a running one is fenced."""
    offloading, copies, chain = new_offloading(2)
    offloading.block_pool.get_new_blocks(2)
    offloading.wait_for_all()
    copies.calls.clear()
    offloading.block_pool.free_blocks(offloading.block_pool.blocks)
    source = offloading.host_tier.get(chain[0].key)
    assert source is not None
    for started in (False, True):
        source.pin_count += 1
        restore = offloading.restore([(source, offloading.block_pool.blocks[0])])
        if started:
            offloading.start_transfers()
        offloading.abandon(restore)
        offloading.start_transfers()
        assert source.pin_count == int(started)
        assert copies.calls == ([("restore", [0]), ("fence", [])] if started else [])
    offloading.wait_for_all()
    assert (source.pin_count, offloading.restores) == (0, 1)


def test_error_while_a_store_starts_leaves_the_other_copies_queued() -> None:
    """A store that cannot start frees its slots; stores and restores behind it start at the next flush."""
    offloading, copies, chain = new_offloading(6)
    offloading.block_pool.get_new_blocks(2)
    offloading.wait_for_all()
    offloading.block_pool.free_blocks(offloading.block_pool.blocks[4:])
    restore_one(offloading, chain[5])
    offloading.block_pool.get_new_blocks(4)
    copies.calls.clear()
    copies.fail_next = True
    with pytest.raises(torch.OutOfMemoryError):
        offloading.start_transfers()
    check_host(offloading.host_tier)
    assert (copies.calls, offloading.host_tier.num_used) == ([], 3)
    offloading.start_transfers()
    assert [name for name, _ in copies.calls] == ["store", "restore"]
    offloading.wait_for_all()
    assert not offloading.host_tier.is_pinned


def test_error_while_a_restore_starts_unpins_its_blocks() -> None:
    """A restore that cannot start unpins its host blocks, and later steps wait for what it may have begun."""
    offloading, copies, chain = new_offloading(2)
    offloading.block_pool.get_new_blocks(2)
    offloading.wait_for_all()
    offloading.block_pool.free_blocks(offloading.block_pool.blocks)
    source = restore_one(offloading, chain[0])
    copies.fail_next = True
    with pytest.raises(torch.OutOfMemoryError):
        offloading.start_transfers()
    assert (source.pin_count, copies.calls[-1]) == (0, ("fence", []))
    assert offloading.host_tier.get(chain[0].key) is source


@pytest.mark.parametrize("method", ["store", "restore"])
def test_copy_that_cannot_start_fails_its_step_only(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory while a copy starts ends the step's requests with an error; the engine goes on."""
    engine, runner, _ = checking_engine(gpu_blocks=6, cpu_blocks=12, polls_per_copy=2)
    prompt = list(range(1, 18))
    earlier, failed, outputs = Outputs(), Outputs(), Outputs()
    for name, text in (("a", prompt), ("b", range(20, 40))):
        engine.add_request(request(name, text, max_tokens=1), earlier)
        while name not in earlier.last:
            engine.step()
    if method == "restore":
        run_to_end(engine)  # no store is left to start

    def fail(*_: object) -> LateTransfer:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner, method, fail)
        engine.add_request(request("c", prompt, max_tokens=1), failed)
        engine.step()
        check_engine(engine)
    assert failed.last["c"].finish_reason == "error"
    check_pool(engine.kv_cache.block_pool, [])
    engine.add_request(request("d", prompt, max_tokens=1), outputs)
    run_to_end(engine)
    assert outputs.last["d"].finish_reason == "length"
    assert engine.reset_prefix_cache()


def test_nothing_is_found_or_announced_before_its_copy_is_done() -> None:
    """A block being stored is not stored again, but it can be restored only once its copy is done."""
    tier, events = new_tier(2)
    (content,) = contents(1)
    block = tier.reserve(content)
    assert block is not None
    assert tier.touch(content.key) is block
    assert tier.get(content.key) is None
    assert events == []
    tier.complete_store([block])
    assert tier.get(content.key) is block
    assert [type(event) for event in events] == [BlockStored]


def test_a_chain_is_announced_as_one_run_with_its_tokens() -> None:
    """A chain stored children first is announced as one run, parents first."""
    tier, events = new_tier(3)
    chain = contents(3)
    tier.complete_store(
        [block for content in reversed(chain) if (block := tier.reserve(content)) is not None]
    )
    (event,) = events
    assert isinstance(event, BlockStored)
    assert (event.medium, event.parent_block_hash, event.token_ids) == ("CPU", None, [0, 0, 1, 1, 2, 2])
    tier.reserve(BlockContent(0, b"x" * 32, None, (7, 7), None, None))
    assert isinstance(events[1], BlockRemoved)
    assert events[1].block_hashes == [event.block_hashes[2]]


def test_eviction_is_lru_and_skips_pinned_blocks() -> None:
    """Eviction is LRU and skips pinned blocks; with all slots pinned, a reservation fails."""
    tier, _ = new_tier(3)
    chain = contents(5)
    blocks = [block for content in chain[:3] if (block := tier.reserve(content)) is not None]
    assert tier.reserve(chain[3]) is None
    tier.complete_store(blocks)
    tier.touch(chain[0].key)
    blocks[1].pin_count += 1
    assert tier.reserve(chain[3]) is not None
    assert [content.key in tier.blocks for content in chain] == [True, True, False, True, False]
    check_host(tier)


def test_a_failed_copy_leaves_its_slot_free() -> None:
    """A failed store frees its slot with the last pin; its block is neither found nor announced."""
    tier, events = new_tier(1)
    first, second = contents(2)
    block = tier.reserve(first)
    assert block is not None
    block.pin_count += 1  # for a swapped-out request
    tier.unpin(block)
    check_host(tier, [block])
    assert (tier.get(first.key), tier.reserve(second)) == (None, None)
    tier.unpin(block)
    check_host(tier)
    assert (tier.num_used, tier.touch(first.key), events) == (0, None, [])
    assert tier.reserve(second) is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copies_move_whole_blocks(device: str, dtype: torch.dtype) -> None:
    """A block stored and restored elsewhere is equal in every plane and byte."""
    torch.manual_seed(0)
    shapes = ((2, 8, 2, 4, 8), (2, 8, 4))
    tensors = [torch.randn(shape).to(dtype).to(device) for shape in shapes]
    copies = new_copies(tensors, 6)
    before = [tensor.float().cpu() for tensor in tensors]
    stored = copies.store([1, 2, 7], [3, 4, 0])
    for tensor in tensors:
        tensor.zero_()
    stored.wait()
    assert stored.done()
    copies.restore([0, 3, 4], [5, 0, 6]).wait()
    copies.fence()
    for tensor, was in zip(tensors, before, strict=True):
        now = tensor.float().cpu()
        assert torch.equal(now[:, [5, 0, 6]], was[:, [7, 1, 2]])
        assert not now[:, [1, 2, 3, 4, 7]].any()
