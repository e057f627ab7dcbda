"""Recorded runs of real engines, played to a whole router: events in, predicted beside delivered out."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from indexer import IndexerConfig
from router.app.server import RouterServer
from tests.support.engines.door import Door, Served, applied_batches, prompt_ids
from tests.support.indexer.engine_publisher import EnginePublisher
from tests.support.router.doors import wait_until
from tests.support.router.server import METRICS, fake_pods, get, ready_pods, running_router, write_pods

_MODEL = "kvroute-tiny"
# vLLM has these counters if and only if it runs with a speculative configuration, whatever the method.
_DRAFTS = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n'
# The capture's pool is unknown; nothing is found to exceed this one.
_PAGE = METRICS.replace('num_gpu_blocks="100"', 'num_gpu_blocks="100000"')
# Speculative entries of a request expire this long after its end.
_SETTLED_S = 0.06


def play(frames_path: Path, folder: Path, *, speculative: bool) -> list[tuple[str, Served]]:
    """Play a capture; return each comparable request with its label.

    Args:
        frames_path: The capture's `*_frames.jsonl.gz`; its requests lie beside it.
        folder: Folder for the router's files.
        speculative: Whether the engine had a speculative configuration.
    """
    frames = [(line["t"], bytes.fromhex(line["frames"][2])) for line in _lines(frames_path)]
    lines = _lines(frames_path.with_name(frames_path.name.replace("_frames.", "_requests.")))
    requests = [line for line in lines if _is_comparable(line)]
    played, published = [], 0
    with _router(folder, speculative) as (publisher, router):
        for request, following in zip_longest(requests, requests[1:]):
            body, answer = request["body"], request["response"]
            salt = {"cache_salt": body["cache_salt"]} if body.get("cache_salt") else {}
            until_s = following["t0"] if following else math.inf
            events = [payload for at_s, payload in frames if at_s <= until_s]
            with Door(router, partial(_answer, publisher, events[published:], answer)) as door:
                sent = {"model": _MODEL, "prompt": prompt_ids(body, answer), **salt}
                played.append((request["label"], door.ask("/v1/completions", sent)))
            published = len(events)
            wait_until(lambda count=published: applied_batches(router) == count, "the batches are applied")
            time.sleep(_SETTLED_S)
    return played


def _answer(publisher: EnginePublisher, events: list[bytes], answer: dict[str, Any], *_: object) -> Any:
    """Publish what the engine published before its next request, and return the answer."""
    for payload in events:
        publisher.publish_payload(payload)
    return answer


@contextmanager
def _router(folder: Path, speculative: bool) -> Iterator[tuple[EnginePublisher, RouterServer]]:
    """Run a publisher and a router with default settings that follows it."""
    with fake_pods(1) as (pod,), EnginePublisher() as publisher:
        pod.metrics = _PAGE + (_DRAFTS if speculative else "")
        ports = {"events": publisher.events_port, "replay": publisher.replay_port}
        labels = {f"kvroute.io/kv-{name}-port": str(port) for name, port in ports.items()}
        path = write_pods(folder / "pods.yaml", [pod.address], **labels, **{"kvroute.io/model": _MODEL})
        with running_router(path, index=IndexerConfig(), responses_full=True) as router:
            wait_until(lambda: ready_pods(router) and get(router, "/ready")[0] == 200, "the router is ready")
            yield publisher, router


def _is_comparable(line: dict[str, Any]) -> bool:
    """Return whether a line is a request with a known prompt that usage covers: not several samples."""
    body, answer = line.get("body") or {}, line.get("response") or {}
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return bool(details) and body.get("n", 1) == 1 and bool(prompt_ids(body, answer))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
