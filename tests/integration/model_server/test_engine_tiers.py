"""The engine with a host tier: restores, swaps, shared prompts, sleep."""

import re
import sys

import pytest
import torch

from model_server import cli
from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.errors import ConfigError
from model_server.kv_events.events import AllBlocksCleared
from tests.integration.model_server.test_engine_model import conversation, generate
from tests.support.model_server.engine import (
    EventLog,
    Outputs,
    cached_copies,
    checking_engine,
    request,
    run_to_end,
)
from tests.support.model_server.invariants import check_engine


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tiers_and_swaps_change_no_token(mode: str) -> None:
    """Requests that are preempted, swapped, evicted and restored generate the same tokens as alone."""
    alone = generate(build_engine(EngineConfig(enable_prefix_caching=False)), conversation())
    events = EventLog()
    engine = build_engine(
        EngineConfig(gpu_blocks=14, max_model_len=160, cpu_blocks=64, preemption_mode=mode),  # type: ignore[arg-type]
        events.publish,
    )
    assert generate(engine, conversation()).tokens == alone.tokens
    assert engine.stats().preemptions > 0
    again = generate(engine, conversation(), at_once=False)
    assert again.tokens == alone.tokens
    assert engine.stats().swapped_in_blocks > 0
    assert events.mirror == cached_copies(engine)


def test_evicted_prompt_is_restored_from_the_host() -> None:
    """An evicted prompt is restored, and counts as a hit in total and in the host tier."""
    engine, runner, events = checking_engine(gpu_blocks=6, cpu_blocks=12, polls_per_copy=2)
    prompt = list(range(1, 18))
    for name, text in (("a", prompt), ("b", range(20, 40)), ("c", prompt)):
        outputs = Outputs()
        engine.add_request(request(name, text, max_tokens=1), outputs)
        run_to_end(engine)
    stats = engine.stats()
    assert outputs.last["c"].cached_tokens == 16
    assert runner.chunks[-1] == [("c", 16, 1)]
    assert (stats.prefix_hits_tokens, stats.host_hits_tokens, stats.restores) == (16, 12, 1)
    assert stats.swapped_in_blocks == 3  # the first block was still on the device
    assert stats.swapped_out_blocks >= 8
    assert events.mirror == cached_copies(engine)


def test_a_request_waits_for_its_restore_while_others_run() -> None:
    """A request waits for its own restore; other requests are not delayed by it."""
    engine, runner, _ = checking_engine(gpu_blocks=10, cpu_blocks=20, polls_per_copy=6)
    prompt = list(range(1, 18))
    for name, text in (("a", prompt), ("b", range(10, 46))):
        engine.add_request(request(name, text, max_tokens=1), Outputs())
        run_to_end(engine)
    begun = len(runner.chunks)
    engine.add_request(request("other", [7], max_tokens=20), Outputs())
    engine.step()
    engine.add_request(request("c", prompt, max_tokens=1), Outputs())
    engine.step()
    engine.step()
    assert [[name for name, _, _ in step] for step in runner.chunks[begun:]] == [["other"]] * 3
    run_to_end(engine)
    assert ("c", 16, 1) in [chunk for step in runner.chunks for chunk in step]


def test_aborted_restore_frees_its_blocks_at_once() -> None:
    """An abort frees the target blocks of a running restore at once and corrupts nothing."""
    engine, _, _ = checking_engine(gpu_blocks=6, cpu_blocks=12, polls_per_copy=9)
    prompt = list(range(1, 18))
    for name, text in (("a", prompt), ("b", range(20, 40))):
        engine.add_request(request(name, text, max_tokens=1), Outputs())
        run_to_end(engine)
    outputs = Outputs()
    engine.add_request(request("c", prompt), outputs)
    engine.step()
    engine.abort_request("c")
    engine.add_request(request("d", range(20, 40)), outputs)
    run_to_end(engine)
    assert outputs.last["c"].finish_reason == "abort"
    assert outputs.last["d"].finish_reason == "length"
    assert engine.stats().kv_usage == 0


def test_restored_blocks_are_shared_on_the_device() -> None:
    """A second request of the same prompt shares the restored blocks."""
    engine, runner, events = checking_engine(gpu_blocks=12, cpu_blocks=24)
    prompt = list(range(1, 18))
    for name, text in (("a", prompt), ("b", [*range(20, 50), *range(20, 34)])):
        engine.add_request(request(name, text, max_tokens=1), Outputs())
        run_to_end(engine)
    for name in "cd":
        engine.add_request(request(name, prompt, max_tokens=12), Outputs())
        engine.step()
        engine.step()
    run_to_end(engine)
    assert engine.stats().restores == 1
    assert ("d", 16, 1) in [chunk for step in runner.chunks for chunk in step]
    assert events.mirror == cached_copies(engine)


@pytest.mark.parametrize(("polls_per_copy", "others"), [(3, 4), (200, 0)])
def test_swapped_blocks_are_not_computed_again(polls_per_copy: int, others: int) -> None:
    """After a swap, a resumed request computes at most one partial block again.

    This also holds if its stores to the host tier have not completed when it resumes.
    """
    engine, runner, _ = checking_engine(
        gpu_blocks=6, cpu_blocks=12, preemption_mode="swap", polls_per_copy=polls_per_copy
    )
    outputs = Outputs()
    for name in "ab":
        engine.add_request(request(name, [ord(name) % 40, 2, 3], max_tokens=16), outputs)
    # Other stores must not evict swapped blocks.
    for number in range(others):
        engine.add_request(request(f"other{number}", [30 + number] * 9, max_tokens=1), outputs)
    run_to_end(engine)
    preemptions = engine.stats().preemptions
    assert preemptions > 0
    assert {len(outputs.tokens[name]) for name in "ab"} == {16}
    computed = sum(length for step in runner.chunks for name, _, length in step if name in "ab")
    assert 2 * (3 + 15) <= computed < 2 * (3 + 15) + engine.block_tokens * preemptions


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cpu_blocks": 0}, "no host tier"),
        ({"cpu_blocks": 4, "enable_prefix_caching": False}, "enable_prefix_caching is off"),
    ],
)
def test_swap_needs_a_host_tier_and_prefix_caching(settings: dict, said: str) -> None:
    """Swap without a host tier or without prefix caching fails the start."""
    with pytest.raises(ConfigError, match=said):
        EngineConfig(preemption_mode="swap", **settings)


def test_a_swapped_block_is_stored_once() -> None:
    """Swap and recompute store the same blocks, each once."""
    stored = {}
    for mode in ("swap", "recompute"):
        engine, _, _ = checking_engine(gpu_blocks=6, cpu_blocks=12, preemption_mode=mode)
        for name in "ab":
            engine.add_request(request(name, [ord(name) % 40, 2, 3], max_tokens=16), Outputs())
        run_to_end(engine)
        assert engine.stats().preemptions > 0
        stored[mode] = engine.stats().swapped_out_blocks
    assert stored["swap"] == stored["recompute"]


def test_the_cache_is_not_reset_under_a_swapped_request() -> None:
    """Swapped blocks count as in use: a reset fails until the request is aborted."""
    engine, _, _ = checking_engine(gpu_blocks=6, cpu_blocks=12, preemption_mode="swap")
    outputs = Outputs()
    for name in "ab":
        engine.add_request(request(name, [ord(name) % 40, 2, 3], max_tokens=16), outputs)
    while not engine.stats().preemptions:
        engine.step()
    (swapped,), (running,) = engine.scheduler.waiting, engine.scheduler.running
    assert swapped.swapped_blocks
    engine.abort_request(running.request_id)
    assert not engine.reset_prefix_cache()
    engine.abort_request(swapped.request_id)
    assert engine.reset_prefix_cache()
    assert engine.stats().host_usage == 0


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_their_prompt(caching: bool) -> None:
    """Copies of a prompt share its full blocks in one step; without prefix caching each is computed."""
    engine, runner, _ = checking_engine(
        gpu_blocks=24, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    outputs = Outputs()
    names = ("first", "second", "third")
    for name in names:
        engine.add_request(request(name, range(1, 15), max_tokens=8), outputs)
    engine.step()
    check_engine(engine)
    begins = [0, 12, 12] if caching else [0, 0, 0]
    assert runner.chunks == [[(name, begin, 14 - begin) for name, begin in zip(names, begins, strict=True)]]
    # 3 shared blocks, plus one partial block for each of the three requests.
    assert engine.stats().kv_usage == pytest.approx((6 if caching else 12) / 24)
    run_to_end(engine)
    assert outputs.tokens["first"] == outputs.tokens["second"] == outputs.tokens["third"]


def test_sleep_clears_both_tiers_and_publishes_it() -> None:
    """Sleep publishes a clear and queues new requests; the engine wakes up with an empty cache."""
    engine, _, events = checking_engine(cpu_blocks=8)
    engine.add_request(request("a", range(1, 10)), Outputs())
    engine.step()
    assert not engine.sleep()
    run_to_end(engine)
    assert engine.sleep()
    assert events.batches[-1][-1] == AllBlocksCleared()
    assert (engine.is_sleeping, engine.stats().host_usage) == (True, 0)
    outputs = Outputs()
    engine.add_request(request("b", range(1, 10)), outputs)
    assert not engine.step()
    assert engine.wake_up()
    assert not engine.wake_up()
    run_to_end(engine)
    assert (outputs.last["b"].finish_reason, outputs.last["b"].cached_tokens) == ("length", 0)


def test_a_real_model_sleeps_and_wakes() -> None:
    """Sleep frees the pool's memory, and outputs after wake-up are unchanged."""
    engine = build_engine(EngineConfig(cpu_blocks=64))
    before = generate(engine, conversation())
    assert engine.sleep()
    assert engine.wake_up()
    assert generate(engine, conversation()).tokens == before.tokens


@pytest.mark.parametrize(
    ("flags", "from_host"),
    [
        ([], 144),
        (["--gpu-blocks", "25"], 144),
        (["--gpu-blocks", "25", "--cpu-blocks", "200"], 144),
        (["--cpu-gib", "0.01"], 144),
        (["--cpu-blocks", "0"], 0),
    ],
)
def test_demo_reports_cold_device_and_host_hits(
    flags: list[str], from_host: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo reports 0 cached tokens cold, and all but the last block on device and host hits."""
    assert cli.main(["demo-offload", "--prompt-tokens", "160", *flags]) == 0
    cold, device, host = capsys.readouterr().out.splitlines()[:3]
    assert ("0 of 160" in cold, "144 of 160" in device) == (True, True)
    assert f"first token, {from_host} of 160" in host


@pytest.mark.parametrize(("device", "host"), [(25, 40), (60, 0)])
def test_demo_under_pressure(device: int, host: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Under pressure both tiers are filled within their budgets; every token is hit in one or computed."""
    sizes = ["--gpu-blocks", str(device), "--cpu-blocks", str(host)]
    assert cli.main(["demo-offload", "--prompt-tokens", "160", *sizes]) == 0
    pressure, *tiers = capsys.readouterr().out.splitlines()[3:]
    asked = int(re.findall(r"\d+", pressure)[-1])
    numbers = [[int(number) for number in re.findall(r"\d+", line)] for line in tiers]
    (on_device, device_most, device_all), (on_host, host_most, host_all, *moved) = numbers[:2]
    computed, preemptions = numbers[2]
    assert on_device + on_host + computed == asked
    assert (device_all, host_all, preemptions) == (device, host, 0)
    assert 0.8 * device <= device_most <= device
    assert 0.8 * host <= host_most <= host
    assert (on_host > 0, any(moved)) == (host > 0, host > 0)


def test_demo_rejects_a_pool_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    """A pool that cannot hold the demo's prompt is a one-line error."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(cli.main(["demo-offload", "--prompt-tokens", "160", "--gpu-blocks", "5"]))
    assert caught.value.code in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1
