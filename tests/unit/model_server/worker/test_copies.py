"""Copies of blocks in chunks on a device's streams, and transfers on several ranks."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_server.kv_cache.host_tier import Transfer
from model_server.worker.block_copies import CpuCopies, CudaCopies
from model_server.worker.executor import MultiRankTransfer
from tests.support.model_server.engine import LateTransfer
from tests.support.model_server.streams import FakeStreams


def test_other_ranks_complete_a_transfer_done_on_rank_0() -> None:
    """The other ranks complete a transfer once, when rank 0 first sees it done or waits for it."""
    settled: list[int] = []
    effects: list[str] = []
    polled = MultiRankTransfer(LateTransfer(lambda: effects.append("polled"), 1), partial(settled.append, 3))
    assert [polled.done() for _ in range(3)] == [False, True, True]
    waited = MultiRankTransfer(LateTransfer(lambda: effects.append("waited"), 9), partial(settled.append, 4))
    waited.wait()
    waited.wait()
    assert waited.done()
    assert (settled, effects) == ([3, 4], ["polled", "waited"])


# Planes and shape of two pool tensors: a block has 2 * 3 + 2 * 1 words of 4 bytes.
SHAPES = ((2, 9, 3), (2, 9, 1))
BLOCK_BYTES = 32
BLOCKS, SLOTS = 9, 11


def new_pool() -> list[torch.Tensor]:
    """Return pool tensors whose words are all different."""
    first = torch.arange(54, dtype=torch.int32).view(SHAPES[0])
    return [first, torch.arange(100, 118, dtype=torch.int32).view(SHAPES[1])]


def new_copies(streams: FakeStreams, pool: list[torch.Tensor], chunk: int, slab_bytes: int) -> CudaCopies:
    """Return copies with chunks of some blocks."""
    sizes = {"chunk_bytes": chunk * BLOCK_BYTES, "slab_bytes": slab_bytes}
    return CudaCopies(pool, SLOTS, **sizes, streams=streams)


def subsets(most: int) -> st.SearchStrategy[list[int]]:
    """Return lists of different numbers, with runs."""
    run = st.tuples(st.integers(0, most - 1), st.integers(1, most))
    runs = st.lists(run, min_size=1, max_size=4)
    return runs.map(
        lambda runs: list(
            dict.fromkeys(
                number for first, length in runs for number in range(first, min(first + length, most))
            )
        )
    )


@given(
    chunk=st.integers(1, 5),
    slab_bytes=st.sampled_from([16, 64, 128, 256, 1024]),
    calls=st.lists(
        st.tuples(st.sampled_from(["store", "restore"]), subsets(BLOCKS), subsets(SLOTS), st.booleans())
    ),
)
def test_chunked_copies_equal_plain_copies_without_a_race(
    chunk: int, slab_bytes: int, calls: list[tuple[str, list[int], list[int], bool]]
) -> None:
    """Any stores, restores and steps between them give what plain copies give, and none of them race."""
    plain_pool, pool, streams = new_pool(), new_pool(), FakeStreams()
    plain, copies = CpuCopies(plain_pool, SLOTS), new_copies(streams, pool, chunk, slab_bytes)
    for both in (plain, copies):  # a slot that was never stored has no defined content
        both.store(range(BLOCKS), range(BLOCKS))
        both.store(range(SLOTS - BLOCKS), range(BLOCKS, SLOTS))
    stores: list[Transfer] = []
    with streams:
        for step, (method, blocks, slots, waits) in enumerate(calls):
            blocks, slots = blocks[: len(slots)], slots[: len(blocks)]
            if method == "store":
                plain.store(blocks, slots)
                stores.append(copies.store(blocks, slots))
                transfer = stores[-1]
            else:
                for store in stores:  # only a slot whose store is done is restored
                    store.wait()
                plain.restore(slots, blocks)
                transfer = copies.restore(slots, blocks)
                copies.fence()
            assert not transfer.done()
            for tensor in (*plain_pool, *pool):  # the next step overwrites one of the blocks
                tensor[:, blocks[0]].copy_(torch.full_like(tensor[:, 0], step), non_blocking=True)
            if waits:
                transfer.wait()
                assert transfer.done()
        copies.close()
    assert all(map(torch.equal, plain_pool, pool))


def test_model_stream_waits_for_no_host_copy_while_two_buffers_are_free() -> None:
    """A step after stores of two chunks waits for their gathers only; a third waits for a buffer's copy."""
    streams = FakeStreams()
    copies = new_copies(streams, new_pool(), 2, 1024)
    with streams:
        transfer = copies.store([0, 1, 2, 3], [4, 5, 6, 7])
        assert set(streams.model.clock) == {"model", "host"}
        assert not transfer.done()
        copies.store([4], [0])
        assert any(streams.model.clock[side.name] for side in streams.sides)
        streams.idle = True
        assert transfer.done()


def test_copies_move_one_chunk_at_most_and_allocate_nothing() -> None:
    """A transfer is divided into chunks; all memory is allocated when the copies are created."""
    streams, pool = FakeStreams(), new_pool()
    with streams:
        copies = new_copies(streams, pool, 3, 1024)
        allocated = len(streams.allocations)
        copies.store(range(9), range(9)).wait()
        copies.restore(range(9), range(9)).wait()
    moved = [len(one.writes) for one in streams.operations if one.stream.startswith("side")]
    assert max(moved) == 3 * BLOCK_BYTES // 4
    assert len(streams.allocations) == allocated


def test_more_chunks_than_pinned_rows_of_numbers_do_not_race() -> None:
    """The host reuses a pinned row of block numbers only after its upload."""
    streams = FakeStreams()
    with streams:
        copies = new_copies(streams, new_pool(), 1, 1024)
        for number in range(150):
            copies.store([number % BLOCKS], [number % SLOTS])
    uploaded = [one for one in streams.operations if (one.stream, one.name) == ("model", "copy_")]
    assert len(uploaded) == 150


def test_a_restore_of_the_whole_host_tier_never_blocks_the_caller() -> None:
    """However many chunks a restore has, queueing it waits for nothing, so other requests' steps go on."""
    streams, blocks = FakeStreams(), 300
    copies = CudaCopies(
        [torch.zeros((1, blocks, 1), dtype=torch.int32)], blocks, chunk_bytes=4, streams=streams
    )
    with streams:
        copies.restore(list(range(blocks)), list(range(blocks)))
    assert not any(streams.host.clock[stream.name] for stream in streams.sides)


@pytest.mark.parametrize(
    ("slab_bytes", "slabs"), [(128, [4, 4, 2, 1]), (256, [8, 2, 1]), (16, [1] * 11), (1024, [8, 2, 1])]
)
def test_host_memory_is_allocated_in_slabs_of_powers_of_two(slab_bytes: int, slabs: list[int]) -> None:
    """Host memory is the asked-for blocks in slabs of a size that torch pins without rounding it up."""
    streams = FakeStreams()
    with streams:
        new_copies(streams, new_pool(), 2, slab_bytes)
    assert [shape[0] for shape in streams.allocations if shape[1:] == (BLOCK_BYTES // 4,)] == slabs


def test_error_between_two_chunks_leaves_copies_usable() -> None:
    """After an error in the middle of a store, later transfers are right and do not race with its chunks."""
    streams, pool = FakeStreams(), new_pool()
    before = [tensor.clone() for tensor in pool]
    gathers = iter(range(99))

    def fail_third_gather(name: str) -> None:
        if name == "index_select" and next(gathers) == 2:
            raise torch.OutOfMemoryError("out of memory")

    with streams:
        copies = new_copies(streams, pool, 2, 1024)
        streams.before = fail_third_gather
        with pytest.raises(torch.OutOfMemoryError):
            copies.store([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
        copies.store([5, 6, 7], [0, 1, 2]).wait()
        copies.restore([0, 1, 2], [0, 1, 2]).wait()
    for tensor, was in zip(pool, before, strict=True):
        assert torch.equal(tensor[:, :3], was[:, 5:8])
