"""What the router says of real engines: broken prefixes, the funnel, and what other policies would do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from kvroute.stack import await_events, empty_caches
from tests.support.kvroute.stack import RunningStack, running_stack, wait_until

MODEL = "kvroute-tiny"
PODS, GPU_BLOCKS, BLOCK_TOKENS = 3, 144, 16
ANSWER_TOKENS = 20
SYSTEM = "You tell of harbours, briefly, and of nothing that was not asked. " * 6
STAGES = ("prompt_tokens", "cacheable", "cached_in_fleet", "cached_on_pod", "predicted")
Message = dict[str, str]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Provide three model servers too small for all conversations, the router and Envoy."""
    directory: Path = tmp_path_factory.mktemp("insight")
    sizes = {"replicas": PODS, "gpu_blocks": GPU_BLOCKS}
    with running_stack(directory, "--gpu-hour-price", "2.5", **sizes) as running:
        yield running


def page(stack: RunningStack, name: str) -> Any:
    """Return a debug page of the router."""
    return urllib3.request("GET", f"{stack.plan.router_debug_url}/debug/{name}", timeout=300).json()


def post(http: urllib3.PoolManager, url: str, messages: list[Message], tokens: int) -> dict[str, Any]:
    """Send a chat; return its answer, with its request id."""
    sent = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = http.request("POST", f"{url}/v1/chat/completions", body=json.dumps(sent), timeout=300)
    assert answer.status == 200, answer.data
    return {**answer.json(), "id": answer.headers.get("x-request-id", "")}


def computed(answer: dict[str, Any]) -> int:
    """Return the prompt tokens that an answer's pod computed."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def story(number: int, turn: int) -> str:
    """Return a question of about 150 tokens."""
    return " ".join(f"Part {turn} of story {number} tells of harbour {at * number}." for at in range(12))


def settle(stack: RunningStack) -> None:
    """Wait until no request runs, the router has received all events and all ends are analysed."""
    wait_until("the ledger is empty", lambda: stack.metric("llm_d_epp_request_running") == 0)
    await_events(stack.plan)
    total = stack.metric("kvroute_router_prompt_tokens_total")
    wait_until(
        "all is analysed", lambda: sum(page(stack, "worth")["models"].get(MODEL, {}).values()) == total
    )


def play(stack: RunningStack, numbers: range, turns: int) -> tuple[list[list[Message]], int]:
    """Hold conversations behind kvroute in turns; return the requests and the tokens computed."""
    http = urllib3.PoolManager(maxsize=1)
    # Other tests had other contents: the caches played along do not know that pods were emptied.
    system = {"role": "system", "content": f"Edition {numbers.start}. {SYSTEM}"}
    histories: dict[int, list[Message]] = {number: [system] for number in numbers}
    played, tokens = [], 0
    for turn in range(turns):
        for number, history in histories.items():
            history.append({"role": "user", "content": story(number, turn)})
            played.append(list(history))
            answer = post(http, stack.plan.gateway_url, history, ANSWER_TOKENS)
            tokens += computed(answer)
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            settle(stack)
    return played, tokens


def estimates(stack: RunningStack) -> dict[str, int]:
    """Return the tokens computed by each policy so far."""
    policies = page(stack, "worth")["policies"]
    return {policy: policies[policy]["computed_tokens"] for policy in policies}


def test_round_robin_computes_what_a_second_run_says(stack: RunningStack) -> None:
    """The estimate for round-robin is what pods too small for all compute behind it, but for a few blocks."""
    before = estimates(stack)
    played, ours = play(stack, range(10, 14), 6)
    estimated = {policy: tokens - before[policy] for policy, tokens in estimates(stack).items()}
    empty_caches(stack.plan)
    http = urllib3.PoolManager(maxsize=1)
    answers = [post(http, stack.plan.round_robin_url, history, ANSWER_TOKENS) for history in played]
    assert estimated["round_robin"] == pytest.approx(sum(map(computed, answers)), rel=0.005)
    assert estimated["round_robin"] < sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert estimated["kvroute"] == pytest.approx(ours, rel=0.02)
    worth = page(stack, "worth")
    saved = worth["saved_per_day"]["round_robin"]
    assert saved["prefill_s"] > 0.0
    assert saved["money"] == pytest.approx(2.5 * saved["gpu_hours"])
    assert worth["verdict"].startswith("Behind round-robin the pods would spend")


def test_least_requests_computes_what_a_second_run_says(stack: RunningStack) -> None:
    """The estimate for least requests equals what pods compute behind it, while one has a long request."""
    empty_caches(stack.plan)
    before = estimates(stack)

    def long_one(url: str) -> urllib3.BaseHTTPResponse:
        sent = {
            "model": MODEL,
            "prompt": "Go on. " * 20,
            "max_tokens": 2000,
            "stream": True,
            "ignore_eos": True,
        }
        answer = http.request("POST", f"{url}/v1/completions", body=json.dumps(sent), preload_content=False)
        answer.read(1)
        return answer

    http = urllib3.PoolManager(maxsize=8)
    running = long_one(stack.plan.gateway_url)
    requests = [[{"role": "user", "content": story(number, 0)}] for number in (20, 21, 20, 21, 20, 22, 21)]
    for messages in requests:
        post(http, stack.plan.gateway_url, messages, 1)
        wait_until("the end is known", lambda: stack.metric("llm_d_epp_request_running") == 1)
    running.close()
    settle(stack)
    estimated = estimates(stack)["least_requests"] - before["least_requests"]
    empty_caches(stack.plan)
    urls = list(stack.plan.pod_urls.values())
    again = long_one(urls[0])
    # Among pods without a request the next in turn is taken; the first one is busy.
    turns = [at % PODS or 1 for at in range(1, len(requests) + 1)]
    tokens = sum(
        computed(post(http, urls[turn], each, 1)) for turn, each in zip(turns, requests, strict=True)
    )
    again.close()
    assert estimated == tokens + stack.decision(running.headers["x-request-id"])["prompt_tokens"]


def test_a_moving_nonce_is_diagnosed(stack: RunningStack) -> None:
    """A number at the head of the system prompt is named, with its cost, in page, record and metrics."""
    http = urllib3.PoolManager(maxsize=1)
    history: list[Message] = [{"role": "system", "content": ""}]
    found = []
    for turn in range(4):
        history[0] = {"role": "system", "content": f"Request {turn * 12_345:08}. {SYSTEM}"}
        history.append({"role": "user", "content": story(30, turn)})
        answer = post(http, stack.plan.gateway_url, history, ANSWER_TOKENS)
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        settle(stack)
        found.append(stack.decision(answer["id"])["prefix_break"])
    assert [each and each["part"] for each in found] == [None, "system", "nonce", "nonce"]
    assert {each["message"] for each in found[1:]} == {0}
    assert all(0 < each["offset_tokens"] < 40 and each["lost_tokens"] > 100 for each in found[1:])
    assert all(each["lost_s"] > 0.0 for each in found[1:])
    breaks = page(stack, "prefix_breaks")
    assert breaks["breaks"][:3] == found[:0:-1]
    (session,) = [each for each in breaks["sessions"] if each["session"] == found[1]["session"]]
    assert (session["turns"], session["breaks"]) == (4, 3)
    assert session["lost_tokens"] == sum(each["lost_tokens"] for each in found[1:])
    assert stack.metric("kvroute_router_prefix_breaks_total") == len(breaks["breaks"])
    assert "harbour" not in json.dumps(breaks)


def test_shared_prefixes_and_the_funnel_are_shown(stack: RunningStack) -> None:
    """A system prompt of several sessions is listed with its pods; each stage is a part of the one before."""
    _, _ = play(stack, range(40, 43), 1)
    # Pods may have lost what earlier sessions shared.
    hottest = next(each for each in page(stack, "prefixes")["prefixes"] if each["pods"])
    assert hottest["hits"] >= 2
    assert hottest["tokens"] % BLOCK_TOKENS == 0
    assert set(hottest["pods"]) <= set(stack.plan.pod_urls)
    funnel = page(stack, "funnel")
    stages, causes = funnel["models"][MODEL], funnel["causes"][MODEL]
    values = [stages[name] for name in STAGES]
    assert values == sorted(values, reverse=True)
    assert stages["prompt_tokens"] == sum(causes.values()) - causes.get("unknown", 0)
    assert stages["predicted"] == causes["hit"] > 0
    assert 0 < stages["delivered"] < stages["delivered_of_prompt_tokens"] <= stages["prompt_tokens"]
