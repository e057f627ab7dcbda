"""The local stack behind Envoy, used by OpenAI's client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import urllib3
from openai import APIStatusError, NotFoundError, OpenAI

from kvroute.demo.load import conversation, new_messages
from kvroute.envoy_config import POD_HEADER
from kvroute.stack import await_events
from tests.support.kvroute.stack import RunningStack, running_stack, wait_until

MODEL = "kvroute-tiny"
BLOCK_TOKENS = 16


@pytest.fixture(scope="module", params=[("check_grpc", "usage"), ("ext_proc", "usage"), ("ext_proc", "full")])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Provide two model servers, the router and Envoy, with each protocol and response mode."""
    door, responses = request.param
    with running_stack(tmp_path_factory.mktemp("stack"), door=door, responses=responses) as running:
        yield running


def say(client: OpenAI, messages: list[dict[str, str]], **options: Any) -> tuple[Any, Any]:
    """Send one chat; return the raw response and the parsed completion."""
    settings: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**{**settings, **options})
    return raw, raw.parse()


def test_a_conversation_stays_with_the_pod_that_remembers_it(stack: RunningStack) -> None:
    """Every turn goes to the first turn's pod, and predicted cached tokens equal the delivered ones."""
    messages: list[dict[str, Any]] = []
    pods = []
    turns = conversation(0, 110).turns
    turns[0][0]["content"] = f"Only in this conversation. {turns[0][0]['content']}"
    for turn, asked in enumerate(turns):
        messages += asked
        raw, completion = say(stack.openai(), messages, extra_body={"ignore_eos": True})
        messages.append({"role": "assistant", "content": completion.choices[0].message.content})
        pods.append(raw.headers[POD_HEADER])
        decision = stack.decision(raw.headers["x-request-id"])
        delivered = completion.usage.prompt_tokens_details.cached_tokens
        assert decision["pod"] == pods[-1]
        assert decision["predicted_cached_tokens"] == delivered
        assert delivered % BLOCK_TOKENS == 0
        assert (delivered > 0) == (turn > 0)
        settle(stack)
    assert len(set(pods)) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_delivered_cached_tokens_are_told(stack: RunningStack, is_streamed: bool) -> None:
    """The decision and the metrics show the cached tokens that the client's usage shows, in each mode."""
    text = f"What is told is shown, streamed: {is_streamed}. " * 20
    before, told = stack.metric("kvroute_router_delivered_cached_tokens_total"), 0
    for turn in range(2):
        message = [{"role": "user", "content": text}]
        if is_streamed:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            raw, stream = say(stack.openai(), message, **options)
            usage = list(stream)[-1].usage
        else:
            raw, completion = say(stack.openai(), message)
            usage = completion.usage
        delivered, request_id = usage.prompt_tokens_details.cached_tokens, raw.headers["x-request-id"]
        assert (delivered > 100) == (turn > 0)
        told += delivered
        wait_until(
            "the decision shows it",
            lambda request_id=request_id, delivered=delivered: (
                stack.decision(request_id)["delivered_cached_tokens"] == delivered
            ),
        )
        assert stack.decision(request_id)["output_tokens"] == usage.completion_tokens
        settle(stack)
    assert stack.metric("kvroute_router_delivered_cached_tokens_total") - before == told


def test_a_burst_with_one_system_prompt_spreads_by_cost(stack: RunningStack) -> None:
    """Sixteen concurrent requests with a shared prefix use both pods, and most hit the cache."""
    settle(stack)
    # Sequential requests would all go to the pod with the prefix, so start them at the same time.
    clients, ready = [stack.openai() for _ in range(16)], Barrier(16)

    def ask(number: int) -> tuple[Any, Any]:
        ready.wait()
        return say(clients[number], new_messages(100 + number))

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(16)))
    pods = Counter(raw.headers[POD_HEADER] for raw, _ in answers)
    decisions = [stack.decision(raw.headers["x-request-id"]) for raw, _ in answers]
    assert len(pods) == 2, decisions
    assert min(pods.values()) >= 3, decisions
    cached = [completion.usage.prompt_tokens_details.cached_tokens for _, completion in answers]
    assert sum(tokens > 0 for tokens in cached) >= 12


def test_streams_arrive_whole_with_64_clients(stack: RunningStack) -> None:
    """No streamed response is truncated: each ends with its usage and all its tokens."""

    def read(number: int) -> int:
        stream = stack.openai(max_retries=0).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Say {number}"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *_, last = list(stream)
        assert last.usage is not None
        return int(last.usage.completion_tokens)

    with ThreadPoolExecutor(64) as threads:
        assert set(threads.map(read, range(64))) == {20}


def test_a_client_that_leaves_frees_its_blocks(stack: RunningStack) -> None:
    """After a disconnect within a stream, no request runs, no block is in use, and the ledger is empty."""
    stream = stack.openai().completions.create(
        model=MODEL, prompt="Go on and on", max_tokens=7000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    settle(stack)
    for url in stack.plan.pod_urls.values():
        assert stack.metric("vllm:kv_cache_usage_perc", url) == 0


def test_models_are_listed_through_the_gateway(stack: RunningStack) -> None:
    """A request without a body is routed."""
    assert [model.id for model in stack.openai().models.list()] == [MODEL]


def test_an_unknown_model_is_an_openai_error(stack: RunningStack) -> None:
    """OpenAI's client understands the rejection."""
    with pytest.raises(NotFoundError) as caught:
        stack.openai(max_retries=0).completions.create(model="no-such-model", prompt="Hello")
    assert "no-such-model" in str(caught.value)


def test_a_prompt_beyond_the_context_is_an_openai_error(stack: RunningStack) -> None:
    """The model server's rejection reaches the client with its numbers."""
    with pytest.raises(APIStatusError) as caught:
        stack.openai(max_retries=0).completions.create(model=MODEL, prompt=[5] * 9000)
    assert caught.value.status_code == 400
    assert "9000" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b'{"model": "kvroute-tiny", "prompt": ', {400}),
        (b"\xff\xfe", {400}),
        (b"[]", {400}),
        (b'{"model": 3, "prompt": "a"}', {400}),
        (b'{"model": "kvroute-tiny"}', {400}),
        (b'{"model": "kvroute-tiny", "prompt": {"a": 1}}', {400}),
        (b'{"model": "kvroute-tiny", "prompt": "a", "max_tokens": "many"}', {400}),
        (b'{"model": "kvroute-tiny", "prompt": "' + b"a" * 10_000_000 + b'"}', {400, 413}),
    ],
    ids=["cut", "bytes", "array", "model", "no-prompt", "prompt", "max-tokens", "10-MB"],
)
def test_bad_bodies_are_openai_errors(stack: RunningStack, body: bytes, statuses: set[int]) -> None:
    """Each invalid body gets an OpenAI 4xx error, and the next valid request is served."""
    response = urllib3.request(
        "POST",
        f"{stack.plan.gateway_url}/v1/completions",
        body=body,
        headers={"content-type": "application/json"},
        timeout=300,
        retries=False,
    )
    assert response.status in statuses
    error = json.loads(response.data)["error"]
    assert error["message"]
    assert error["type"]
    assert stack.openai(max_retries=0).completions.create(model=MODEL, prompt="Hello", max_tokens=2).choices


def settle(stack: RunningStack) -> None:
    """Wait until no request runs and the router has received all events."""
    for url in stack.plan.pod_urls.values():
        wait_until("the pods are idle", lambda: stack.metric("vllm:num_requests_running", url) == 0)  # noqa: B023
    wait_until("the ledger is empty", lambda: stack.metric("llm_d_epp_request_running") == 0)
    await_events(stack.plan)
