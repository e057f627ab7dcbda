"""Captures of real engines in ../shared/data, joined in their middle: what is proven is right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig, PodStream
from indexer.index.contract import StreamState
from indexer.streams.ingest import Ingest
from tests.support.paths import ROOT

FRAMES = sorted((ROOT.parent / "shared" / "data").glob("vllm_*_frames.jsonl.gz"))
POD = "10.0.0.1:8000"
# The captures are short: their time passes faster, so that their second half is not over before it settles.
FASTER = 20.0
# Least number of the later 44 requests whose match is proven. Engines with several KV cache groups prove
# nothing, and the later prompts of run1 are all new ones.
PROVEN = {"draft_model_bs64": 16, "eagle_bs32": 25, "eagle_nodrop_bs32": 21, "mtp_glm4moe_bs32": 25}


def lines(path: Path) -> list[dict[str, Any]]:
    """Read a gzipped file of JSON lines."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def is_tokens(body: dict[str, Any] | None) -> bool:
    """Return whether a request's prompt is a list of token ids."""
    prompt = (body or {}).get("prompt")
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def followed(state: StreamState, reason: str, *, has_drafter: bool) -> Ingest:
    """Return an ingest that follows one engine."""
    config = IndexerConfig(block_tokens=16, hash_seed=1)
    ingest = Ingest(config, CollectorRegistry(), lambda *_: None, lambda *_: None, lambda: 1.0)
    ingest.opened(PodStream(POD, "m", "tcp://127.0.0.1:1"))
    ingest.set_drafter(POD, has_drafter)
    ingest.state(POD, state, reason)
    return ingest


def proven(ingest: Ingest, prompt: list[int], salt: str | None) -> tuple[int, bool]:
    """Return the proven blocks of a prompt, and whether there are no others."""
    keys = ingest.hasher.chain(ingest.hasher.root("m", None, salt), prompt)
    return ingest.proven(POD, keys, ingest.index.held(keys, POD), ingest.state_of(POD).stride)


@pytest.mark.skipif(not FRAMES, reason="the captures (../shared/data) are not part of the repository")
@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.name.removesuffix("_frames.jsonl.gz"))
def test_what_is_proven_of_a_late_view_is_what_the_whole_view_holds(path: Path) -> None:
    """A view that misses a capture's first half proves no match that differs from that of the whole view."""
    frames = [(line["t"], msgspec.msgpack.decode(bytes.fromhex(line["frames"][2]))) for line in lines(path)]
    lines_sent = lines(path.with_name(path.name.replace("_frames.", "_requests.")))
    requests = [line for line in lines_sent if line["kind"] == "request" and is_tokens(line["body"])]
    has_drafter = not path.name.startswith("vllm_run")
    whole = followed(StreamState.EXACT, "", has_drafter=has_drafter)
    late = followed(StreamState.STALE, "no_history", has_drafter=has_drafter)
    applied, results = 0, []
    joined_s = requests[len(requests) // 2]["t0"]
    for request in requests:
        while applied < len(frames) and frames[applied][0] < request["t0"]:
            ts, *rest = frames[applied][1]
            payload = msgspec.msgpack.encode([ts * FASTER, *rest])
            whole.apply(POD, [payload])
            if frames[applied][0] >= joined_s:
                late.apply(POD, [payload])
            applied += 1
        if request["t0"] > joined_s:
            prompt, salt = request["body"]["prompt"], request["body"].get("cache_salt")
            results.append((proven(late, prompt, salt), proven(whole, prompt, salt)[0]))
    ends = [(blocks, truth) for (blocks, is_end), truth in results if is_end]
    print(f"{path.name}: {len(ends)} of {len(results)} matches are proven")
    assert [pair for pair in ends if pair[0] != pair[1]] == []
    assert all(blocks <= truth for (blocks, _), truth in results)
    name = path.name.removeprefix("vllm_").removesuffix("_frames.jsonl.gz")
    assert len(ends) >= PROVEN.get(name, 0)
