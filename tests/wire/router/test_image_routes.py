"""Requests with images, from a renderer's response to the pick, for two pods that have published events.

The renderer speaks HTTP and the pods ZMQ; both use recorded outputs of vLLM's own classes. Without a renderer
the images have ids (`uuid`), and the prompt's tokens follow from the model's files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.picking.decision import Decision
from router.prompts.request import RequestKind, api_request
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.indexer.engine_publisher import EnginePublisher, batch, stored, wait_until
from tests.support.indexer.subscriber import OTHER, POD, Watched, stream
from tests.support.router.bench import Bench, ready_pod
from tests.support.router.doors import body, headers, serving
from tests.support.router.render import CHAT, Renderer, running_renderer
from tests.support.tokenization.images import image_part, write_model
from tests.support.tokenization.media import (
    BLOCK_TOKENS,
    CASES,
    agreeing_blocks,
    answer,
    engine_hashes,
    payloads,
)

MODEL = "qwen2-vl"
# Blocks that each pod has computed.
HELD = {POD: ("one_image", "salted"), OTHER: ("another_image", "sound_and_image")}


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """Return an index that has applied all events of the pods."""
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
    """Run a server that renders prompts to token ids."""
    with running_renderer() as running:
        yield running


def pick(name: str, renderer: Renderer, watched: Watched) -> Decision:
    """Return the decision of a new router for a case's chat."""
    renderer.answers = {CHAT: (200, answer(name))}
    sources = {MODEL: f"http://{renderer.address}"}
    tokenizers = TokenizerRegistry(open_tokenizers(sources), TokenizeOptions(deadline_s=300))
    bench = Bench(index=watched.indexer, tokenizers=tokenizers)  # type: ignore[arg-type]
    bench.with_pods(*(ready_pod(pod, model=MODEL) for pod in HELD))
    body = {"model": MODEL, "messages": name, "cache_salt": CASES[name]["cache_salt"]}
    decision = bench.router.route(api_request(name, RequestKind.CHAT, body, 400), 0.0)
    tokenizers.close()
    return decision


@pytest.mark.parametrize("name", [name for name in CASES if name != "adapter"])
def test_a_prompt_goes_where_its_images_were_seen(name: str, renderer: Renderer, watched: Watched) -> None:
    """Of two pods with equal token ids, the pod that has cached this image is picked, with its blocks.

    Blocks after the image count too: the predicted cached tokens are those that vLLM would find.
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


def test_an_image_is_found_by_its_name_without_a_renderer(tmp_path: Path) -> None:
    """By ext_proc, the pod that has cached an image with this id is picked, up to the last full block.

    Without an id the prompt is known only up to the image, and its total length is known.
    """
    tokenizers = TokenizerRegistry(
        open_tokenizers({MODEL: write_model(tmp_path, "qwen")}), TokenizeOptions(300)
    )
    said = {"type": "text", "text": "What is it, and where? " * 9}

    def request(uuid: str | None) -> dict[str, object]:
        content = [said, image_part(300, 200, uuid), said]
        return {"model": MODEL, "messages": [{"role": "user", "content": content}]}

    tokens = tokenizers.prompt_tokens(api_request("r", RequestKind.CHAT, request("cat"), 400), MODEL)
    (ids,), ((item,),) = tokens.prompts, tokens.media
    blocks = len(ids) // BLOCK_TOKENS
    starts = range(0, blocks * BLOCK_TOKENS, BLOCK_TOKENS)
    within = [start < item.offset + item.length and item.offset < start + BLOCK_TOKENS for start in starts]
    extra_keys = [
        [["cat", item.offset - start]] if has else None for start, has in zip(starts, within, strict=True)
    ]
    with EnginePublisher() as engine:
        running = Watched(block_tokens=BLOCK_TOKENS)
        running.follow(stream(engine, POD, MODEL))
        engine.wait_for_subscriber()
        ids_stored = ids[: blocks * BLOCK_TOKENS].tolist()
        event = stored(list(range(1, blocks + 1)), ids_stored, None, BLOCK_TOKENS, extra_keys=extra_keys)
        engine.publish_payload(batch(event))
        wait_until("all blocks are known", lambda: sum(keys for _, keys in running.stored) == blocks)
        bench = Bench(index=running.indexer, tokenizers=tokenizers)  # type: ignore[arg-type]
        bench.with_pods(*(ready_pod(pod, model=MODEL) for pod in HELD))
        with serving(bench) as served:
            for name in ("cat", "dog", None):
                served.exchange(
                    headers(path="/v1/chat/completions", x_request_id=str(name)),
                    body(json.dumps(request(name)).encode()),
                )
        told = {name: bench.decision_log.find(str(name)) for name in ("cat", "dog", None)}
        running.indexer.close()
    tokenizers.close()
    for name, cached in (
        ("cat", blocks),
        ("dog", item.offset // BLOCK_TOKENS),
        (None, item.offset // BLOCK_TOKENS),
    ):
        shown = told[name]
        assert shown is not None
        held = {candidate["pod"]: candidate["cached_tokens"] for candidate in shown["candidates"]}
        assert (held[POD], shown["prompt_tokens"]) == (cached * BLOCK_TOKENS, len(ids)), name
        assert (shown["degraded"], shown["partial"]) == (None, None if name else "media")
    assert told["cat"] is not None
    assert (told["cat"]["pod"], told["cat"]["candidates"][1]["cached_tokens"]) == (POD, 0)
