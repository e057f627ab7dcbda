"""Hybrid models with sliding windows and full attention: caching, events and index predictions."""

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
from tests.support.indexer.decoding import decode_batch
from tests.support.indexer.views import OnePod
from tests.support.model_server.engine import (
    EventLog,
    Outputs,
    cached_copies,
    checking_engine,
    request,
    run_to_end,
)
from tests.support.model_server.invariants import check_engine
from tests.support.model_server.model import save_reference, text_of
from tests.support.paths import DATA

BLOCK_TOKENS = 4
MAX_BYTES = 1 << 24


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Listener(EventLog):
    """Index that applies the engine's batches in wire format."""

    def __init__(self) -> None:
        super().__init__()
        self.pod = OnePod(BLOCK_TOKENS)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Apply one batch."""
        super().publish(events)
        batch = decode_batch(encode_batch(KVEventBatch(0.0, events, 0)), MAX_BYTES).batch
        assert not self.pod.apply(*batch.events).skipped

    def predicted(self, prompt: list[int]) -> int:
        """Return the number of prompt tokens that the index expects to be cached."""
        return self.pod.match(self.pod.keys(prompt), len(prompt)).cached_blocks * BLOCK_TOKENS


def cached_tokens(engine: EngineCore, name: str, prompt: list[int]) -> tuple[int, list[int]]:
    """Run one request alone; return its cached tokens and its output tokens."""
    outputs = Outputs()
    engine.add_request(request(name, prompt, max_tokens=6, ignore_eos=True), outputs)
    run_to_end(engine)
    return outputs.last[name].cached_tokens, outputs.tokens[name]


@pytest.mark.parametrize("cpu_blocks", [0, 60])
def test_index_predicts_cache_hits_of_a_gemma_model(tmp_path: Path, cpu_blocks: int) -> None:
    """For a Gemma 3 with windows, the index predicts from events alone the hits that the engine reports.

    Prompts share prefixes of many lengths, conversations continue, and blocks are evicted and restored.
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
    engine = build_engine(config, events.publish)
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
    # The second prompt's miss made the engine retain its divergence point, so the third prompt hits there.
    assert hits[:4] == [0, 0, 20, 32]
    assert bool(engine.stats().host_hits_tokens) == bool(cpu_blocks)


def test_events_of_a_hybrid_are_those_of_vllm() -> None:
    """A cold prompt's events equal those captured from vLLM 0.32 (6 blocks of 32 tokens, window 64)."""
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


def test_blocks_behind_the_window_are_freed() -> None:
    """A long request keeps all blocks in the full-attention group and at most 4 in the window's group."""
    engine, _, _ = checking_engine((5, None), gpu_blocks=60, max_num_batched_tokens=8, max_model_len=120)
    engine.add_request(request("a", range(1, 41), max_tokens=40), Outputs())
    for _ in range(30):
        engine.step()
        check_engine(engine)
    (running,) = engine.scheduler.running
    windowed, full = (len(table.held_blocks()) for table in running.block_tables)
    assert (full, windowed <= 4) == (-(-(running.num_tokens - 1) // 4), True)


def _captured_cold_prompt() -> list[dict]:
    """Return the first two events of the captured run with windows."""
    lines = gzip.decompress((DATA / "vllm_run3_frames.jsonl.gz").read_bytes())
    frame = msgspec.json.decode(lines.splitlines()[0])
    events = msgspec.msgpack.decode(bytes.fromhex(frame["frames"][2]))[1]
    return [event for event in events if event["type"] == "BlockStored"][:2]
