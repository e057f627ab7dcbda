"""Sliding windows beside full attention in a running engine: what is kept, announced and predicted."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.kv_events.events import BlockStored, KVEvent, KVEventBatch, encode_batch
from tests.integration.engine_support import (
    EventLog,
    Outputs,
    cached_copies,
    checking_engine,
    request,
    run_to_end,
)
from tests.support.decoding import decode_batch
from tests.support.engine_invariants import check_engine
from tests.unit.indexer_support import OnePod
from tests.unit.model_support import save_reference, text_of

BLOCK_TOKENS = 4
MAX_BYTES = 1 << 24


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Listener(EventLog):
    """An indexer that hears the engine's batches as they go over the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.pod = OnePod(BLOCK_TOKENS)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Apply one batch."""
        super().publish(events)
        batch = decode_batch(encode_batch(KVEventBatch(0.0, events, 0)), MAX_BYTES).batch
        assert not self.pod.apply(*batch.events).skipped

    def predicted(self, prompt: list[int]) -> int:
        """How many tokens of a prompt the indexer takes for cached."""
        return self.pod.match(self.pod.keys(prompt), len(prompt)).cached_blocks * BLOCK_TOKENS


def cached_tokens(engine: EngineCore, name: str, prompt: list[int]) -> tuple[int, list[int]]:
    """Run one request alone; returns its cached tokens and the tokens that it generated."""
    outputs = Outputs()
    engine.add_request(request(name, prompt, max_tokens=6, ignore_eos=True), outputs)
    run_to_end(engine)
    return outputs.last[name].cached_tokens, outputs.tokens[name]


@pytest.mark.parametrize("cpu_blocks", [0, 60])
def test_an_indexer_predicts_what_a_gemma_serves(tmp_path: Path, cpu_blocks: int) -> None:
    """For a Gemma-3 with windows, from events alone, the prediction is what the engine then reports.

    Prompts share starts of many lengths, conversations go on, and the pool is small enough that blocks are
    evicted; with a host tier they come back from there.
    """
    kinds = ["sliding_attention", "full_attention"] * 2
    save_reference(tmp_path, "gemma3", num_hidden_layers=4, layer_types=kinds, sliding_window=9, head_dim=10)
    events = Listener()
    config = EngineConfig(
        model=str(tmp_path),
        block_tokens=BLOCK_TOKENS,
        gpu_blocks=70,
        cpu_blocks=cpu_blocks,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=20,
    )
    engine = build_engine(config, events)
    texts = [text_of(57, seed) for seed in range(4)]
    prompts = [texts[0][:33], texts[0][:20] + texts[1][:13], texts[0][:20] + texts[2][:13], texts[0][:33]]
    prompts += [text[:length] for length in (48, 33, 49, 17) for text in texts]
    hits = []
    for number, prompt in enumerate(prompts):
        predicted = events.predicted(prompt)
        served, answer = cached_tokens(engine, f"r{number}", prompt)
        assert served == predicted, f"request {number}"
        hits.append(served)
        if number % 3 == 0 and len(prompt) < 50:
            turn = [*prompt, *answer, 5]
            predicted = events.predicted(turn)
            served, _ = cached_tokens(engine, f"r{number}-next", turn)
            assert served == predicted == (len(turn) - 2) // BLOCK_TOKENS * BLOCK_TOKENS
    assert events.mirror == cached_copies(engine)
    # The third prompt shares as much as the second: the second's miss made the engine keep that junction.
    assert hits[:4] == [0, 0, 20, 32]
    assert bool(engine.stats().host_hits_tokens) == bool(cpu_blocks)


def test_events_of_a_hybrid_are_those_of_vllm() -> None:
    """A cold prompt of 6 blocks, window 64, block 32: as captured from vLLM 0.32, in all of its fields."""
    engine, _, events = checking_engine(
        (64, None), block_tokens=32, gpu_blocks=40, max_num_batched_tokens=2048, max_model_len=512
    )
    engine.add_request(request("a", [1 + number % 40 for number in range(192)], max_tokens=1), Outputs())
    run_to_end(engine)
    windowed, full = events.batches[0]
    assert isinstance(windowed, BlockStored)
    assert isinstance(full, BlockStored)
    captured = _captured_cold_prompt()
    for ours, theirs in zip((windowed, full), captured, strict=True):
        fields = msgspec.to_builtins(ours)
        places = [full.block_hashes.index(name) for name in ours.block_hashes]
        their_places = [captured[1]["block_hashes"].index(name) for name in theirs["block_hashes"]]
        assert (places, len(fields["token_ids"])) == (their_places, len(theirs["token_ids"]))
        same = fields.keys() & theirs.keys() - {"block_hashes", "token_ids"}
        assert {name: fields[name] for name in same} == {name: theirs[name] for name in same}
        assert theirs.keys() - {"session_id"} <= fields.keys()


def test_what_has_rolled_out_of_a_window_is_free() -> None:
    """A long text holds all its blocks with full attention, and a handful in the group with a window."""
    engine, _, _ = checking_engine((5, None), gpu_blocks=60, max_num_batched_tokens=8, max_model_len=120)
    engine.add_request(request("a", range(1, 41), max_tokens=40), Outputs())
    for _ in range(30):
        engine.step()
        check_engine(engine)
    (running,) = engine.scheduler.running
    windowed, full = (len(table.held_blocks()) for table in running.block_tables)
    assert (full, windowed <= 4) == (-(-(running.num_tokens - 1) // 4), True)


def _captured_cold_prompt() -> list[dict]:
    """The first two events of the captured run with windows."""
    lines = gzip.decompress((Path(__file__).parents[1] / "data/vllm_run3_frames.jsonl.gz").read_bytes())
    frame = msgspec.json.decode(lines.splitlines()[0])
    events = msgspec.msgpack.decode(bytes.fromhex(frame["frames"][2]))[1]
    return [event for event in events if event["type"] == "BlockStored"][:2]
