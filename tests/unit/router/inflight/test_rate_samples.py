"""Tests of rate samples: only requests with known tokens and no other delay count in a prefill rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from indexer import StreamState
from router.feedback.outcomes import RESPONSE
from router.inflight.rates import RateParameters
from router.picking.cost import CostParameters
from router.pods.engine_load import EngineLoad, LoraLoad
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import TINY, Bench, completion, ended, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")
PRIOR = RateParameters().prior_tokens_per_s


def learnt_rate(bench: Bench, requests: Sequence[RouteRequest], tokens_per_s: float) -> float:
    """Return the pod's estimated rate after it has prefilled these requests at a given rate.

    Args:
        tokens_per_s: True rate, in tokens that the router counts as uncached.
    """
    for request in requests:
        decision = bench.router.route(request, 0.0)
        end_s = decision.primary.uncached_tokens / tokens_per_s
        bench.lifecycle.first_token(request.request_id, RESPONSE, end_s, pod=A.address)
        ended(bench.lifecycle, request.request_id, RESPONSE, end_s, pod=A.address)
    return bench.rates.load_table.prefill_tokens_per_s(A.address)


def prompts(model: str = TINY) -> list[RouteRequest]:
    """Return requests without common prefixes."""
    return [completion(f"r{number}", long_text(400, number), model=model) for number in range(20)]


def with_image(request: RouteRequest) -> RouteRequest:
    """Return a chat request with the prompt and an image; only the prompt can be tokenized."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": request.body["prompt"]}, image]
    body = {"model": request.model, "messages": [{"role": "user", "content": content}]}
    return msgspec.structs.replace(request, kind=RequestKind.CHAT, body=body)


@pytest.mark.parametrize("tokens_per_s", [1_000.0, 100_000.0])
def test_prompt_without_known_tokens_is_no_sample(tokens_per_s: float) -> None:
    """A prompt that is not tokenized, or only up to an image, does not change the pod's rate."""
    unknown = Bench().with_pods(ready_pod(A.address, model="unknown"))
    assert learnt_rate(unknown, prompts("unknown"), tokens_per_s) == PRIOR
    images = [with_image(request) for request in prompts()]
    assert learnt_rate(Bench().with_pods(A), images, tokens_per_s) == PRIOR


def test_unseen_cache_hits_do_not_raise_the_rate() -> None:
    """Fast prefills of a pod with a STALE view do not raise its rate; those of an EXACT one do."""
    bench = Bench().with_pods(A)
    bench.index.state = StreamState.STALE
    assert learnt_rate(bench, prompts(), 150_000.0) == PRIOR
    exact = Bench().with_pods(A)
    assert learnt_rate(exact, prompts(), 150_000.0) > 100_000.0


def test_copies_from_the_host_tier_do_not_lower_the_rate() -> None:
    """A short prefill after a long copy from the host tier is no sample; one after a short copy is."""
    head = long_text(4000, 1)
    for head_words, expected in ((4000, PRIOR), (40, PRIOR / 2)):
        bench, cached = Bench().with_pods(A), " ".join(head.split()[:head_words])
        bench.index.hold(A.address, bench.keys(cached), host=True)
        requests = [completion(f"r{n}", f"{cached} {long_text(100, 9 + n)}") for n in range(64)]
        assert learnt_rate(bench, requests, 5_000.0) == pytest.approx(expected, rel=0.4)


@pytest.mark.parametrize(("running", "expected"), [({"sql"}, 1_000.0), (set(), PRIOR)])
def test_loading_an_adapter_does_not_lower_the_rate(running: set[str], expected: float) -> None:
    """A request with a LoRA adapter is a sample only if the adapter is already running on the pod."""
    lora = LoraLoad(frozenset(running), frozenset(), 1)
    pod = replace(ready_pod(A.address, adapters=["sql"]), load=EngineLoad(0, 0, 0.0, None, 0.0, lora=lora))
    rate = learnt_rate(Bench().with_pods(pod), prompts("sql"), 1_000.0)
    # The fleet's rate is part of the estimate.
    assert rate == pytest.approx(expected, rel=0.5)


def test_rate_is_corrected_for_decoding_requests() -> None:
    """The rate of a prefill beside decoding requests is corrected for their slowdown."""
    bench = Bench().with_pods(A)
    for number in range(50):
        bench.router.route(completion(f"d{number}", "hello"), 0.0)
        bench.lifecycle.first_token(f"d{number}", RESPONSE, 0.0, pod=A.address)
    slowdown = 1.0 + 50 * CostParameters().decode_slowdown
    assert learnt_rate(bench, prompts(), PRIOR / slowdown) == pytest.approx(PRIOR)
