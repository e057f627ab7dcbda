"""Requests with images, from a renderer's answer to the pick, where two pods have told of their caches.

The renderer speaks HTTP, the pods speak ZMQ; both say what vLLM's own classes make of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.decision import Decision
from router.request import RequestKind, api_request
from router.tokens import TokenizeOptions, TokenizerRegistry
from tests.unit.media_support import BLOCK_TOKENS, CASES, agreeing_blocks, answer, engine_hashes, payloads
from tests.unit.router_support import Bench, ready_pod
from tests.wire.engine_publisher import EnginePublisher, wait_until
from tests.wire.render_support import CHAT, Renderer, running_renderer
from tests.wire.subscribe_support import OTHER, POD, Watched, stream

MODEL = "qwen2-vl"
# What each pod has computed.
HELD = {POD: ("one_image", "salted"), OTHER: ("another_image", "sound_and_image")}


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """An index that has heard of all that the pods hold."""
    with EnginePublisher() as first, EnginePublisher() as second:
        running = Watched(block_tokens=BLOCK_TOKENS)
        engines = dict(zip(HELD, (first, second), strict=True))
        running.follow(*(stream(engine, pod, MODEL) for pod, engine in engines.items()))
        for pod, engine in engines.items():
            engine.wait_for_subscriber()
            for payload in [payload for name in HELD[pod] for payload in payloads(name)]:
                engine.publish_payload(payload)
        blocks = sum(len(engine_hashes(name)) for names in HELD.values() for name in names)
        wait_until("all blocks are known", lambda: sum(keys for _, keys in running.stored) == blocks)
        yield running
        running.indexer.close()


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """What tells the token ids."""
    with running_renderer() as running:
        yield running


def pick(name: str, renderer: Renderer, watched: Watched) -> Decision:
    """Where a case's chat is sent by a router that has sent nothing yet."""
    renderer.answers = {CHAT: (200, answer(name))}
    sources = {MODEL: f"http://{renderer.address}"}
    tokenizers = TokenizerRegistry.load(sources, TokenizeOptions(deadline_s=300))
    bench = Bench(index=watched.indexer, tokenizers=tokenizers)  # type: ignore[arg-type]
    bench.with_pods(*(ready_pod(pod, model=MODEL) for pod in HELD))
    body = {"model": MODEL, "messages": name, "cache_salt": CASES[name]["cache_salt"]}
    decision = bench.router.route(api_request(name, RequestKind.CHAT, body, 400), 0.0)
    tokenizers.close()
    return decision


@pytest.mark.parametrize("name", [name for name in CASES if name != "adapter"])
def test_a_prompt_goes_where_its_images_were_seen(name: str, renderer: Renderer, watched: Watched) -> None:
    """Of two pods with equal token ids the one that saw this very image is picked, and its blocks count.

    Also those behind the image: what the decision says is cached is what vLLM would take from there.
    """
    decision = pick(name, renderer, watched)
    assert (decision.degraded, decision.partial) == (None, None)
    served = (len(CASES[name]["rendered"]["token_ids"]) - 1) // BLOCK_TOKENS
    cached = {
        pod: min(served, max(agreeing_blocks(name, held) for held in names)) * BLOCK_TOKENS
        for pod, names in HELD.items()
    }
    assert {candidate.pod: candidate.cached_tokens for candidate in decision.ranked} == cached
    assert cached[decision.primary.pod] == max(cached.values())
