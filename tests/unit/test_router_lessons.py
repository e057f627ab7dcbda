"""Which requests teach a pod's prefill rate: those whose time is known to be that of known tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from indexer import StreamState
from router.feedback.lifecycle import RESPONSE
from router.inflight.rates import RateParameters
from router.picking.cost import CostParameters
from router.pods.engine_load import EngineLoad, LoraLoad
from router.prompts.request import RequestKind, RouteRequest
from tests.unit.router_support import TINY, Bench, completion, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")
PRIOR = RateParameters().prior_tokens_per_s


def taught(bench: Bench, requests: Sequence[RouteRequest], tokens_per_s: float) -> float:
    """What is believed of the bench's pod after these requests, of which it computes so many tokens a second.

    Args:
        tokens_per_s: Of the tokens that the router takes for uncached.
    """
    for request in requests:
        decision = bench.router.route(request, 0.0)
        end_s = decision.primary.uncached_tokens / tokens_per_s
        bench.outcomes.first_token(request.request_id, RESPONSE, end_s, pod=A.address)
        bench.outcomes.ended(request.request_id, RESPONSE, end_s, pod=A.address)
    return bench.rates.board.prefill_tokens_per_s(A.address)


def prompts(model: str = TINY) -> list[RouteRequest]:
    """Requests of which no two share a prefix."""
    return [completion(f"r{number}", long_text(400, number), model=model) for number in range(20)]


def with_image(request: RouteRequest) -> RouteRequest:
    """A chat of the request's prompt and an image, of which the prompt alone can be tokenized."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": request.body["prompt"]}, image]
    body = {"model": request.model, "messages": [{"role": "user", "content": content}]}
    return msgspec.structs.replace(request, kind=RequestKind.CHAT, body=body)


@pytest.mark.parametrize("tokens_per_s", [1_000.0, 100_000.0])
def test_what_is_not_tokenized_teaches_no_rate(tokens_per_s: float) -> None:
    """A prompt of which only the bytes are known, or only the beginning, says nothing of a pod's speed."""
    unknown = Bench().with_pods(ready_pod(A.address, model="unknown"))
    assert taught(unknown, prompts("unknown"), tokens_per_s) == PRIOR
    images = [with_image(request) for request in prompts()]
    assert taught(Bench().with_pods(A), images, tokens_per_s) == PRIOR


def test_a_cache_out_of_sight_makes_no_pod_fast() -> None:
    """An engine without events that serves nine tenths of each prompt from its cache is not believed fast."""
    bench = Bench().with_pods(A)
    bench.index.state = StreamState.STALE
    assert taught(bench, prompts(), 150_000.0) == PRIOR
    exact = Bench().with_pods(A)
    assert taught(exact, prompts(), 150_000.0) > 100_000.0


def test_copies_from_the_host_are_no_slow_prefill() -> None:
    """A short prefill behind a long copy from the host teaches nothing, one behind a short copy does."""
    head = long_text(4000, 1)
    for head_words, believed in ((4000, PRIOR), (40, PRIOR / 2)):
        bench, cached = Bench().with_pods(A), " ".join(head.split()[:head_words])
        bench.index.hold(A.address, bench.keys(cached), host=True)
        requests = [completion(f"r{n}", f"{cached} {long_text(100, 9 + n)}") for n in range(64)]
        assert taught(bench, requests, 5_000.0) == pytest.approx(believed, rel=0.4)


@pytest.mark.parametrize(("running", "believed"), [({"sql"}, 1_000.0), (set(), PRIOR)])
def test_an_adapters_load_is_no_slow_prefill(running: set[str], believed: float) -> None:
    """Only where the adapter runs already a first token tells how fast the pod prefills."""
    lora = LoraLoad(frozenset(running), frozenset(), 1)
    pod = replace(ready_pod(A.address, adapters=["sql"]), load=EngineLoad(0, 0, 0.0, None, 0.0, lora=lora))
    learnt = taught(Bench().with_pods(pod), prompts("sql"), 1_000.0)
    # What is believed of the fleet weighs in.
    assert learnt == pytest.approx(believed, rel=0.5)


def test_decoding_requests_do_not_make_a_pod_slow() -> None:
    """A prefill beside many that decode is known to be slowed by them; the rate is that without them."""
    bench = Bench().with_pods(A)
    for number in range(50):
        bench.router.route(completion(f"d{number}", "hello"), 0.0)
        bench.outcomes.first_token(f"d{number}", RESPONSE, 0.0, pod=A.address)
    slowdown = 1.0 + 50 * CostParameters().decode_slowdown
    assert taught(bench, prompts(), PRIOR / slowdown) == pytest.approx(PRIOR)
