"""Slot accounting of the host tier, and block copies."""

import pytest
import torch

from model_server.kv_cache.host_tier import HostTier
from model_server.kv_events.events import BlockContent, BlockRemoved, BlockStored, KVEvent, KVEventBuilder
from model_server.shapes.shape import single_group
from model_server.worker.block_copies import new_copies
from tests.support.model_server.invariants import check_host

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
    """A failed store frees its slot; its block is neither found nor announced."""
    tier, events = new_tier(1)
    first, second = contents(2)
    block = tier.reserve(first)
    assert block is not None
    tier.discard(block)
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
