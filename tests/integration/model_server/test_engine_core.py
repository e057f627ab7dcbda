"""The engine around a checking model: request lifecycle, cache hits, events, failures."""

import logging
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from common.repeated_log import REPEATED_EVENTS
from model_server.config import EngineConfig
from model_server.engine.core import EngineCore
from model_server.errors import ConfigError, EngineClosedError, QueueFullError, RequestError
from model_server.kv_cache.request import ScheduledRequest
from model_server.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams
from tests.support.model_server.engine import (
    EOS,
    VOCAB_SIZE,
    Outputs,
    SlowCopies,
    cached_copies,
    checking_engine,
    next_token,
    request,
    run_to_end,
)
from tests.support.model_server.invariants import check_engine


def generate(engine: EngineCore, item: EngineCoreRequest) -> tuple[list[int], EngineCoreOutput]:
    """Run one request alone; return its tokens and its last output."""
    outputs = Outputs()
    engine.add_request(item, outputs)
    run_to_end(engine)
    return outputs.tokens[item.request_id], outputs.last[item.request_id]


def continued(prompt: list[int], count: int) -> list[int]:
    """Return what the checking model generates after a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


def test_tokens_are_delivered_in_order_with_a_finish_reason() -> None:
    """Tokens are delivered in order, and the last output has finish reason "length"."""
    engine, _, _ = checking_engine()
    tokens, last = generate(engine, request("a", [1, 2, 3], max_tokens=6))
    assert tokens == continued([1, 2, 3], 6)
    assert last == EngineCoreOutput("a", (tokens[-1],), "length", 0, started_s=last.started_s)


def test_stop_tokens_end_a_request() -> None:
    """A stop token ends generation and is included in the output."""
    text = continued([1, 2, 3], 8)
    engine, _, _ = checking_engine()
    item = request("a", [1, 2, 3], max_tokens=8, stop_token_ids=frozenset({text[2]}))
    tokens, last = generate(engine, item)
    assert (tokens, last.finish_reason) == (text[:3], "stop")


def test_end_of_sequence_can_be_ignored() -> None:
    """An end-of-sequence token ends a request unless ignore_eos is set."""
    engine, runner, _ = checking_engine()
    runner.eos_token_ids = frozenset({EOS, continued([5], 2)[1]})
    assert generate(engine, request("a", [5], max_tokens=4))[1].finish_reason == "stop"
    assert generate(engine, request("b", [5], max_tokens=4, ignore_eos=True))[1].finish_reason == "length"


def test_generation_ends_at_the_models_context() -> None:
    """Prompt and output together never exceed max_model_len."""
    engine, _, _ = checking_engine(max_model_len=10)
    tokens, last = generate(engine, request("a", range(7), max_tokens=50))
    assert (len(tokens), last.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("length", "cached"),
    [(16, 12), (17, 16), (15, 12), (5, 4), (4, 0), (3, 0)],
)
def test_repeated_prompt_hits_all_blocks_but_the_last_tokens(length: int, cached: int) -> None:
    """A cache hit covers at most the full blocks within the first n-1 of n prompt tokens, as in vLLM."""
    engine, _, _ = checking_engine()
    prompt = list(range(1, length + 1))
    assert generate(engine, request("a", prompt, max_tokens=1))[1].cached_tokens == 0
    assert generate(engine, request("b", prompt, max_tokens=1))[1].cached_tokens == cached
    stats = engine.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (2 * length, cached)


def test_aligned_repeat_stores_its_last_block_again() -> None:
    """Recomputing the last block of an aligned prompt stores a second copy and removes nothing."""
    engine, _, events = checking_engine()
    generate(engine, request("a", range(1, 9), max_tokens=1))
    generate(engine, request("b", range(1, 9), max_tokens=1))
    first, second = (batch[0] for batch in events.batches)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, len(first.block_hashes)) == (None, 2)
    assert (second.parent_block_hash, second.block_hashes) == (first.block_hashes[0], first.block_hashes[1:])
    assert sorted(events.mirror.values()) == [1, 2]


def test_generated_tokens_are_cached_too() -> None:
    """A conversation's next turn hits the blocks filled by the previous output."""
    engine, _, events = checking_engine()
    tokens, _ = generate(engine, request("a", [1, 2, 3], max_tokens=10))
    stored = [event for batch in events.batches for event in batch]
    # 13 tokens, the last without KV: 12 computed tokens make 3 blocks.
    assert [token for event in stored for token in event.token_ids] == [1, 2, 3, *tokens[:9]]
    _, last = generate(engine, request("b", [1, 2, 3, *tokens, 7], max_tokens=1))
    assert last.cached_tokens == 12


def test_only_equal_salts_share_blocks() -> None:
    """Only prompts with equal cache_salt share blocks; the event lists the salt on the first block only."""
    engine, _, events = checking_engine()
    for name, salt, cached in (("a", "x", 0), ("b", None, 0), ("c", "y", 0), ("d", "x", 8)):
        item = request(name, range(1, 10), max_tokens=1, cache_salt=salt)
        assert generate(engine, item)[1].cached_tokens == cached
    assert [event.extra_keys for batch in events.batches for event in batch] == [
        [["x"], None],
        [None, None],
        [["y"], None],
    ]


def test_without_caching_nothing_is_shared_or_announced() -> None:
    """Without prefix caching there are neither hits nor events."""
    engine, _, events = checking_engine(enable_prefix_caching=False)
    for name in "ab":
        assert generate(engine, request(name, range(1, 17), max_tokens=2))[1].cached_tokens == 0
    assert events.batches == []
    assert engine.stats().prefix_queries_tokens == 0


def test_one_batch_a_step_with_removals_first() -> None:
    """A step that evicts and stores publishes one batch: one removal per block, then the store."""
    engine, _, events = checking_engine(gpu_blocks=5)
    generate(engine, request("a", range(1, 17), max_tokens=1, cache_salt="a"))
    stored = events.batches[0][0].block_hashes
    generate(engine, request("b", range(1, 13), max_tokens=1))
    assert len(events.batches) == 2
    *removed, last = events.batches[1]
    assert [event.block_hashes for event in removed if isinstance(event, BlockRemoved)] == [
        [stored[3]],
        [stored[2]],
    ]
    assert isinstance(last, BlockStored)


def test_abort_frees_the_blocks_before_the_next_step() -> None:
    """An abort ends the request with reason "abort", frees its blocks and stops its computation."""
    engine, runner, _ = checking_engine()
    outputs = Outputs()
    engine.add_request(request("a", range(1, 10), max_tokens=20), outputs)
    engine.add_request(request("b", [7], max_tokens=2), outputs)
    engine.step()
    engine.abort_request("a")
    engine.abort_request("a")
    engine.abort_request("nobody")
    assert engine.stats().kv_usage > 0
    engine.step()
    assert [name for name, _, _ in runner.chunks[-1]] == ["b"]
    assert outputs.last["a"].finish_reason == "abort"
    assert engine.stats().kv_usage == 0
    check_engine(engine)


def test_request_id_can_be_reused_after_an_abort() -> None:
    """A request id can be reused and aborted again after its request has ended."""
    engine, _, _ = checking_engine()
    for _ in range(2):
        outputs = Outputs()
        engine.add_request(request("a", [1], max_tokens=20), outputs)
        engine.step()
        engine.abort_request("a")
        run_to_end(engine)
        assert outputs.last["a"].finish_reason == "abort"


def test_pending_abort_spares_a_new_request_with_the_same_id() -> None:
    """A pending abort of an ended request does not abort a new request with the same id."""
    engine, runner, _ = checking_engine()
    first, second = Outputs(), Outputs()
    compute = runner.execute_model

    def abort_during_the_step(chunks: Sequence[ScheduledRequest]) -> dict[str, int]:
        engine.abort_request("a")
        runner.execute_model = compute  # type: ignore[method-assign]
        return compute(chunks)

    def submit_again(output: EngineCoreOutput) -> None:
        first(output)
        engine.add_request(request("a", [4], max_tokens=3), second)

    runner.execute_model = abort_during_the_step  # type: ignore[method-assign]
    engine.add_request(request("a", [4], max_tokens=1), submit_again)
    run_to_end(engine)
    assert first.last["a"].finish_reason == "length"
    assert second.last["a"].finish_reason == "length"


def test_preemption_changes_no_token() -> None:
    """Requests preempted in a small pool generate the same tokens as alone; each preemption is logged."""
    logged = CollectorRegistry()
    logged.register(REPEATED_EVENTS)
    counted = "kvroute_repeated_events_total", {"event": "preemption"}
    before = logged.get_sample_value(*counted) or 0.0
    engine, _, _ = checking_engine(gpu_blocks=8, max_num_batched_tokens=8)
    outputs = Outputs()
    prompts = {name: [start, start + 1, start + 2] for name, start in (("a", 1), ("b", 10), ("c", 20))}
    for name, prompt in prompts.items():
        engine.add_request(request(name, prompt, max_tokens=16), outputs)
    run_to_end(engine)
    assert 0 < engine.stats().preemptions == (logged.get_sample_value(*counted) or 0.0) - before
    assert outputs.tokens == {name: continued(prompt, 16) for name, prompt in prompts.items()}
    assert all(last.cached_tokens == 0 for last in outputs.last.values())


def test_failed_copy_ends_running_requests_and_leaks_no_slot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed block copy ends the running requests, leaks no slot, and the engine continues."""
    engine, _, events = checking_engine(gpu_blocks=12, cpu_blocks=12)
    outputs = Outputs()
    engine.add_request(request("short", range(1, 10), max_tokens=1), outputs)
    engine.add_request(request("long", range(20, 26), max_tokens=9), outputs)
    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr(SlowCopies, "store", lambda *_: 1 / 0)
        run_to_end(engine)
    assert outputs.last["short"].finish_reason == "length"
    assert outputs.last["long"].error == "the step could not be scheduled: division by zero"
    check_engine(engine)
    assert events.mirror == cached_copies(engine)
    assert engine.stats().host_usage == 0
    tokens, _ = generate(engine, request("next", range(1, 10), max_tokens=4))
    assert tokens == continued(list(range(1, 10)), 4)
    assert engine.stats().host_usage > 0
    assert engine.stats().healthy


def test_a_failing_model_fails_the_requests_of_its_step_only(caplog: pytest.LogCaptureFixture) -> None:
    """A failed forward pass ends only its step's requests and caches no uncomputed block."""
    engine, runner, events = checking_engine()
    outputs = Outputs()
    engine.add_request(request("a", range(1, 10)), outputs)
    runner.fail_next = True
    with caplog.at_level(logging.CRITICAL):
        assert engine.step()
    last = outputs.last["a"]
    error = "the model failed: out of luck"
    assert last == EngineCoreOutput("a", (), "error", 0, error, started_s=last.started_s)
    check_engine(engine)
    assert (events.mirror, engine.stats().kv_usage) == ({}, 0)
    tokens, last = generate(engine, request("b", range(1, 10)))
    assert (tokens, last.cached_tokens) == (continued(list(range(1, 10)), 4), 0)
    assert engine.stats().healthy


def test_raising_output_callback_aborts_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    """An output callback that raises aborts its own request only."""
    engine, _, _ = checking_engine()
    outputs, calls = Outputs(), []

    def broken(output: EngineCoreOutput) -> None:
        calls.append(output)
        raise ValueError("no one is listening")

    with caplog.at_level(logging.CRITICAL):
        engine.add_request(request("bad", [3], max_tokens=9), broken)
        engine.add_request(request("good", [4], max_tokens=9), outputs)
        run_to_end(engine)
    assert [call.finish_reason for call in calls] == [None, "abort"]
    assert outputs.tokens["good"] == continued([4], 9)


def test_raising_event_publisher_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """If the event publisher raises, events are lost but tokens are delivered."""
    engine, _, events = checking_engine()
    events.publish = lambda batch: 1 / 0  # type: ignore[assignment, return-value]
    with caplog.at_level(logging.CRITICAL):
        tokens, _ = generate(engine, request("a", range(1, 9), max_tokens=5))
    assert tokens == continued(list(range(1, 9)), 5)


def test_reset_needs_an_idle_engine_and_publishes_at_once() -> None:
    """A reset fails while blocks are in use; on an idle engine it is published without another step."""
    engine, _, events = checking_engine()
    engine.add_request(request("a", range(1, 10), max_tokens=2), Outputs())
    engine.step()
    assert not engine.reset_prefix_cache()
    run_to_end(engine)
    assert engine.reset_prefix_cache()
    assert events.batches[-1] == [AllBlocksCleared()]
    assert generate(engine, request("b", range(1, 10)))[1].cached_tokens == 0


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (request("r", []), "prompt"),
        (request("r", range(20)), "prompt"),
        (request("r", [VOCAB_SIZE]), "prompt"),
        (request("r", [-1]), "prompt"),
        (request("r", [1], logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (request("r", [1], allowed_token_ids=frozenset()), "allowed_token_ids"),
        (request("r", [1], stop_token_ids=frozenset({99})), "stop_token_ids"),
        (request("taken", [1]), "request_id"),
    ],
)
def test_impossible_requests_are_rejected(item: EngineCoreRequest, param: str) -> None:
    """A request that can never run is rejected with the invalid field and leaves no state."""
    engine, _, _ = checking_engine(max_model_len=20)
    engine.add_request(request("taken", [1]), Outputs())
    with pytest.raises(RequestError) as caught:
        engine.add_request(item, Outputs())
    assert caught.value.param == param
    assert engine.stats().waiting == 1


def test_full_queue_rejects_until_requests_start() -> None:
    """Requests beyond max_waiting are rejected until waiting ones have started."""
    engine, _, _ = checking_engine(max_waiting=2)
    engine.add_request(request("a", [1]), Outputs())
    engine.add_request(request("b", [2]), Outputs())
    with pytest.raises(QueueFullError):
        engine.add_request(request("c", [3]), Outputs())
    engine.step()
    engine.add_request(request("c", [3]), Outputs())
    assert (engine.stats().running, engine.stats().waiting) == (2, 1)


def test_a_pool_that_cannot_hold_one_request_is_refused() -> None:
    """Start fails if the longest permitted request does not fit into the pool."""
    config = EngineConfig(gpu_blocks=4, block_tokens=4)
    with pytest.raises(ConfigError, match="max_model_len is 17"):
        EngineCore(config, checking_engine()[1], None, max_model_len=17)


def test_closed_engine_aborts_and_rejects() -> None:
    """Closing aborts live requests and rejects later ones."""
    engine, _, _ = checking_engine()
    outputs = Outputs()
    engine.add_request(request("a", [1]), outputs)
    engine.close()
    engine.close()
    assert outputs.last["a"].finish_reason == "abort"
    assert not engine.reset_prefix_cache()
    with pytest.raises(EngineClosedError):
        engine.add_request(EngineCoreRequest("b", (1,), SamplingParams(max_tokens=1)), outputs)
