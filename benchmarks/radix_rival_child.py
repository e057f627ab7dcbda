"""Benchmark of Dynamo's `RadixTree` where it is installed: `python radix_rival_child.py WHAT ROUNDS QUICK`.

Prints one JSON object per line: name, unit, values, setting. Uses only the rival and the standard library.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

from dynamo._core import RadixTree, compute_block_hash_for_seq

_PODS = 256
_PROMPT_BLOCKS = 1000


def main() -> int:
    """Measure and print all figures."""
    what, rounds, quick = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    if what == "events":
        for blocks_per_event in (32, 1):
            _events(blocks_per_event, 256 if quick else 65_536, rounds)
    elif what == "match":
        _matches(8 if quick else 200, rounds)
    else:
        _keys(3 if quick else 100, rounds)
    return 0


def _events(blocks_per_event: int, blocks: int, rounds: int) -> None:
    rng = random.Random(1)
    hashes = [rng.getrandbits(63) for _ in range(blocks)]
    per_prompt = min(1024, blocks)
    stores, removals = [], []
    for start in range(0, blocks, blocks_per_event):
        run = hashes[start : start + blocks_per_event]
        stores.append(_stored(run, hashes[start - 1] if start % per_prompt else None))
        removals.append(_event({"removed": {"block_hashes": run[::-1]}}))
    stored, removed = [], []
    for _ in range(rounds + 1):
        tree = RadixTree()
        stored.append(blocks / _apply(tree, stores))
        removed.append(blocks / _apply(tree, removals[::-1]))
    setting = {"blocks_per_event": blocks_per_event, "blocks": blocks}
    _print(f"rival_radix_ingest_{blocks_per_event}_per_event_blocks_per_s", "blocks/s", stored[1:], setting)
    _print(f"rival_radix_remove_{blocks_per_event}_per_event_blocks_per_s", "blocks/s", removed[1:], setting)


def _matches(calls: int, rounds: int) -> None:
    for name, depths in (
        ("two", dict.fromkeys(range(2), _PROMPT_BLOCKS)),
        ("all", dict.fromkeys(range(_PODS), _PROMPT_BLOCKS)),
        ("staggered", {pod: _PROMPT_BLOCKS * (pod + 1) // _PODS for pod in range(_PODS)}),
    ):
        tree = RadixTree()
        chain = list(range(1, _PROMPT_BLOCKS + 1))
        for pod, depth in depths.items():
            tree.apply_event(pod, _stored(chain[:depth], None))
        times = []
        for _ in range(calls * rounds):
            started_ns = time.perf_counter_ns()
            found = tree.find_matches(chain).scores
            times.append((time.perf_counter_ns() - started_ns) / 1000)
        if {pod: found[pod, 0] for pod in depths} != depths:
            raise RuntimeError(f"the rival matched otherwise than expected: {found}")
        _print(f"rival_radix_match_1000x256_{name}_us", "us", times, {"state": "hot", "pods_holding": name})


def _keys(calls: int, rounds: int) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(128_000) for _ in range(16_384)]
    times = []
    for _ in range(calls * rounds):
        started_ns = time.perf_counter_ns()
        compute_block_hash_for_seq(tokens, 16)
        times.append((time.perf_counter_ns() - started_ns) / 1000)
    _print("rival_keys_16384_tokens_block16_us", "us", times, {"input": "list", "chained": False})


def _apply(tree: RadixTree, events: Sequence[bytes]) -> float:
    started_s = time.process_time()
    for event in events:
        tree.apply_event(0, event)
    # Processed by the tree's thread after all events, so its return means that they are applied.
    tree.find_matches([0])
    return time.process_time() - started_s


def _stored(run: Sequence[int], parent: int | None) -> bytes:
    blocks = [{"block_hash": block, "tokens_hash": block} for block in run]
    return _event({"stored": {"parent_hash": parent, "blocks": blocks}})


def _event(data: dict[str, object]) -> bytes:
    return json.dumps({"event_id": 1, "data": data}).encode()


def _print(name: str, unit: str, values: Sequence[float], setting: dict[str, object]) -> None:
    shown = {**setting, "rival": f"ai-dynamo-runtime {version('ai-dynamo-runtime')}"}
    print(json.dumps({"name": name, "unit": unit, "values": values, "setting": shown}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
