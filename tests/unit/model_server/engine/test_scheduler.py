"""The scheduler: which tokens of which requests a step computes."""

from collections.abc import Sequence

import torch

from model_server.config import SchedulingPolicy
from model_server.engine.scheduler import Scheduler
from model_server.kv_cache.block_pool import BlockPool
from model_server.kv_cache.host_tier import HostTier, OffloadingManager
from model_server.kv_cache.manager import KVCacheManager
from model_server.kv_cache.request import Request, ScheduledRequest
from model_server.kv_events.events import KVEventBuilder
from model_server.requests import EngineCoreRequest, SamplingParams
from model_server.shapes.shape import kv_groups
from model_server.worker.block_copies import CpuCopies


def live_request(name: str, prompt: Sequence[int]) -> Request:
    """Return a request that has just arrived."""
    return Request(EngineCoreRequest(name, tuple(prompt), SamplingParams(max_tokens=100)), sampling_seed=0)


def new_manager(
    blocks: int, tokens: int, *, caching: bool = True, windows: Sequence[int | None] = (None,)
) -> KVCacheManager:
    """Return a KV cache manager with blocks of 4 tokens."""
    groups = kv_groups(windows)
    event_builder = KVEventBuilder(groups, 4)
    pool = BlockPool(blocks, event_builder)
    offload = OffloadingManager(
        pool, HostTier(0, event_builder, pool.add_event), CpuCopies([torch.zeros(1, blocks, 4)], 0)
    )
    return KVCacheManager(
        pool,
        offload,
        groups,
        block_tokens=4,
        chunk_tokens=tokens,
        enable_prefix_caching=caching,
    )


def new_scheduler(
    blocks: int = 16,
    tokens: int = 8,
    seqs: int = 4,
    *,
    caching: bool = True,
    policy: SchedulingPolicy = "fcfs",
) -> Scheduler:
    """Return a scheduler over a pool with blocks of 4 tokens."""
    manager = new_manager(blocks, tokens, caching=caching)
    return Scheduler(manager, max_num_seqs=seqs, max_num_batched_tokens=tokens, policy=policy)


def step(scheduler: Scheduler, seconds_per_token: float = 0.0) -> list[tuple[str, int, int]]:
    """Schedule a step, mark it as computed, and append a token to requests that sample."""
    chunks: list[ScheduledRequest] = scheduler.schedule(seconds_per_token)
    for chunk in chunks:
        chunk.request.num_computed_tokens = chunk.stop
        if chunk.samples:
            chunk.request.token_ids.append(1)
    return [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in chunks]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    """A long prefill takes one budget per step and samples only after its last token."""
    scheduler = new_scheduler()
    scheduler.add_request(live_request("a", range(18)))
    assert [step(scheduler) for _ in range(4)] == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 2)],
        [("a", 18, 1)],
    ]


def test_decodes_come_before_prefills() -> None:
    """Decodes run in every step; prefills get the rest of the budget."""
    scheduler = new_scheduler()
    scheduler.add_request(live_request("short", range(3)))
    scheduler.add_request(live_request("long", range(20, 40)))
    assert step(scheduler) == [("short", 0, 3), ("long", 0, 5)]
    assert step(scheduler) == [("short", 3, 1), ("long", 5, 7)]
    scheduler.add_request(live_request("later", range(50, 53)))
    assert step(scheduler) == [("short", 4, 1), ("long", 12, 7)]
    assert step(scheduler) == [("short", 5, 1), ("long", 19, 1), ("later", 0, 3)]


def test_no_more_requests_run_than_allowed() -> None:
    """max_num_seqs bounds the batch; other requests wait in order."""
    scheduler = new_scheduler(seqs=2)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add_request(live_request(name, [token]))
    assert [name for name, _, _ in step(scheduler)] == ["a", "b"]
    scheduler.remove_request(scheduler.running[0])
    assert [name for name, _, _ in step(scheduler)] == ["b", "c"]


def test_admission_needs_room_for_the_whole_prompt() -> None:
    """A request waits until its whole prompt fits, and later requests do not overtake it."""
    scheduler = new_scheduler(blocks=4)
    scheduler.add_request(live_request("a", range(8)))
    assert step(scheduler) == [("a", 0, 8)]
    scheduler.add_request(live_request("b", range(20, 32)))
    scheduler.add_request(live_request("c", [9]))
    assert step(scheduler) == [("a", 8, 1)]
    scheduler.remove_request(scheduler.running[0])
    assert step(scheduler) == [("b", 0, 8)]


def test_allocation_is_for_all_groups_or_none() -> None:
    """If the free blocks do not suffice for all groups together, none is allocated."""
    manager = new_manager(blocks=3, tokens=8, windows=(None, 8))
    request = live_request("a", range(8))
    manager.attach_prefix(request, manager.get_computed_blocks(request))
    assert not manager.allocate_slots(request, 8)
    assert manager.block_pool.num_free_blocks == 3
    assert manager.allocate_slots(request, 4)
    assert manager.block_pool.num_free_blocks == 1


def test_a_free_prefix_block_does_not_count_twice() -> None:
    """Admission does not count free blocks of the cached prefix as free for allocation."""
    scheduler = new_scheduler(blocks=4)
    first = live_request("a", range(8))
    scheduler.add_request(first)
    step(scheduler)
    scheduler.remove_request(first)
    holder = live_request("h", [40])
    scheduler.add_request(holder)
    step(scheduler)
    # 4 blocks: one in use, three free, two of them the prefix. 16 tokens need two blocks besides the prefix.
    scheduler.add_request(live_request("b", [*range(8), *range(20, 28)]))
    assert [name for name, _, _ in step(scheduler)] == ["h"]
    scheduler.remove_request(holder)
    assert step(scheduler) == [("b", 8, 8)]


def test_the_last_request_is_preempted_and_runs_first_again() -> None:
    """Without a free block the last admitted request is preempted for a decode, and waits in front."""
    scheduler = new_scheduler(blocks=4, tokens=16, caching=False)
    for name, start in (("a", 0), ("b", 10)):
        scheduler.add_request(live_request(name, range(start, start + 8)))
    assert step(scheduler) == [("a", 0, 8), ("b", 0, 8)]
    scheduler.add_request(live_request("c", [9]))
    assert step(scheduler) == [("a", 8, 1)]
    assert scheduler.preemptions == 1
    assert scheduler.preempted == [("b", "decode", "recompute", 8, 0)]
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]
    scheduler.remove_request(scheduler.running[0])
    assert step(scheduler) == [("b", 0, 9), ("c", 0, 1)]


def test_resumed_request_hits_its_own_blocks() -> None:
    """A preempted request's full blocks stay cached, so its second prefill is short."""
    scheduler = new_scheduler(blocks=4, tokens=16)
    for name, start in (("a", 0), ("b", 10)):
        scheduler.add_request(live_request(name, range(start, start + 8)))
    step(scheduler)
    step(scheduler)
    scheduler.remove_request(scheduler.running[0])
    assert step(scheduler) == [("b", 4, 5)]  # its tail block was reused for a's ninth token
    assert scheduler.cached_prompt_tokens == 0  # its own cached blocks are not counted as a hit


def test_requests_of_one_step_share_blocks() -> None:
    """A request hits blocks that another request computes in the same step."""
    scheduler = new_scheduler(tokens=16)
    scheduler.add_request(live_request("a", range(10)))
    scheduler.add_request(live_request("b", range(10)))
    assert step(scheduler) == [("a", 0, 10), ("b", 8, 2)]


def test_waiting_prompts_are_hashed_up_to_the_first_uncached_block() -> None:
    """Hashing of long waiting prompts stops at the first uncached block; the shortest runs next."""
    scheduler = new_scheduler(blocks=900, tokens=8, seqs=8, policy="aged")
    prompts = [live_request(f"r{number}", [number] * (400 - number)) for number in range(5)]
    for request in prompts:
        scheduler.add_request(request)
    step(scheduler, seconds_per_token=1.0)
    begun, *others = reversed(prompts)
    assert scheduler.running == [begun]
    assert [len(request.block_hashes) for request in others] == [1] * 4


def test_lookups_continue_in_the_next_step() -> None:
    """Lookups of waiting prompts beyond a step's limit continue in the next step."""
    scheduler = new_scheduler(blocks=900, tokens=8, seqs=8, policy="aged")
    prompts = [live_request(f"r{number}", [number] * 400) for number in range(600)]
    for request in prompts:
        scheduler.add_request(request)
    step(scheduler)
    assert not all(request.block_hashes for request in prompts)
    for _ in range(3):
        step(scheduler)
    assert all(request.block_hashes for request in prompts)


def test_lookup_continues_where_the_last_one_ended() -> None:
    """A limited lookup of one prompt continues in the next call."""
    manager = new_manager(blocks=40, tokens=100)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=100)
    scheduler.add_request(live_request("first", [7] * 100))
    step(scheduler)
    same = live_request("same", [7] * 100)
    assert [(manager.update_expected_hits(same, 10), same.expected_hit_tokens // 4) for _ in range(4)] == [
        (10, 9),
        (10, 18),
        (7, 24),
        (1, 24),
    ]
