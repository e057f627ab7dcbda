"""Demonstration of a running stack: the same requests through kvroute, round-robin and least requests.

Each policy begins with empty caches. The order of the policies is reversed from round to round, so that no
policy gains from a warm machine. The answers are meaningless, because the model's weights are random.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import urllib3

from kvroute.demo.load import SMALL_LOAD, Ask, Load, Message, Session, new_messages, waves
from kvroute.demo.report import KVROUTE, LEAST_REQUESTS, ROUND_ROBIN, Answer, Results, report, table
from kvroute.envoy_config import POD_HEADER
from kvroute.http_client import Http
from kvroute.router_pages import RouterPages
from kvroute.stack import LocalStackError, StackPlan, await_events, empty_caches
from model_server.config import TINY_MODEL

_HTTP = Http()
_ANSWER_TOKENS = 4
# Pause of the users between two turns, in which the events of the last blocks arrive.
_PAUSE_S = 0.05


def run_demo(
    plan: StackPlan, check: Callable[[], None], say: Callable[[str], None], load: Load | None = None
) -> Results:
    """Run the demonstration and print what each policy delivered.

    Args:
        check: Called after each policy's requests; raises a LocalStackError if a process of the stack died.
        say: Prints a line of progress.
        load: Sizes of the load; None: chosen by the model.

    Raises:
        LocalStackError, OSError: A request failed.
    """
    load = load or (Load() if plan.model_name == TINY_MODEL else SMALL_LOAD)
    urls = {
        KVROUTE: plan.gateway_url,
        ROUND_ROBIN: plan.round_robin_url,
        LEAST_REQUESTS: plan.least_requests_url,
    }
    first = _chat(plan.gateway_url, plan.model_name, new_messages(0))
    say(f"first answer, by {first.pod}")
    _warm_up(plan, list(urls.values()))
    total: dict[str, list[Answer]] = {policy: [] for policy in urls}
    for number in range(load.rounds):
        asks = waves(load, seed=number)
        done: dict[str, list[Answer]] = {}
        for policy in sorted(urls, key=list(urls).index, reverse=bool(number % 2)):
            done[policy] = _run(plan, urls[policy], asks, explain=policy == KVROUTE)
            check()
            _reset_caches(plan)
            total[policy] += done[policy]
            say(f"round {number + 1} of {load.rounds}: {len(done[policy])} requests routed by {policy}")
        print(f"\n{table(done)}\n", flush=True)
    print(f"{report(total)}\n\ndashboard, while the stack is up: {plan.router_debug_url}/", flush=True)
    return total


def _run(plan: StackPlan, url: str, asks: Sequence[Sequence[Ask]], *, explain: bool) -> list[Answer]:
    """Send all waves; with `explain`, add what the router predicted to the answers."""
    said: dict[Session, list[Message]] = {ask.session: [] for wave in asks for ask in wave}
    answers: list[Answer] = []
    with ThreadPoolExecutor(max(map(len, asks))) as threads:
        for wave in asks:
            answered = list(threads.map(partial(_ask, url, plan.model_name, said), wave))
            _pause(plan)
            if explain:
                pages = RouterPages(plan.router_debug_url)
                for answer in answered:
                    answer.predicted_tokens = pages.decision(answer.request_id)["predicted_cached_tokens"]
            answers += answered
    return answers


def _ask(url: str, model: str, said: dict[Session, list[Message]], ask: Ask) -> Answer:
    messages = said[ask.session]
    messages += ask.session.turns[ask.turn]
    answer = _chat(url, model, messages, tools=ask.session.tools)
    messages.append(ask.session.answer(ask.turn, answer.text))
    answer.part, answer.session = ask.part, ask.session.name
    return answer


def _pause(plan: StackPlan) -> None:
    time.sleep(_PAUSE_S)
    await_events(plan)


def _warm_up(plan: StackPlan, urls: Sequence[str]) -> None:
    """Run the code paths of every pod and listener once, so that no policy is charged for first calls."""
    for url in (*plan.pod_urls.values(), *urls):
        for number in range(2):
            _chat(url, plan.model_name, new_messages(1000 + number))
    _reset_caches(plan)


def _reset_caches(plan: StackPlan) -> None:
    empty_caches(plan)
    _pause(plan)


def _chat(base_url: str, model: str, messages: Sequence[Message], *, tools: Sequence[Message] = ()) -> Answer:
    """Send one streaming request (greedy, exactly `_ANSWER_TOKENS` tokens) and read the whole answer."""
    url = f"{base_url}/v1/chat/completions"
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        # The answers are text, whatever they look like; the loop's calls are scripted.
        body |= {"tools": list(tools), "tool_choice": "none"}
    started_s = time.monotonic()
    with _HTTP.open(url, body) as response:
        if response.status != 200:
            text = response.read(500).decode(errors="replace")
            raise LocalStackError(f"{url} answered {response.status}: {text}")
        return _read(response, started_s)


def _read(response: urllib3.BaseHTTPResponse, started_s: float) -> Answer:
    ttft_s, pieces, usage = None, [], None
    # The response yields each line as soon as it arrives.
    for line in response:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        choices = event.get("choices") or []
        piece = choices[0].get("delta", {}).get("content") if choices else None
        if piece:
            ttft_s = ttft_s or time.monotonic() - started_s
            pieces.append(piece)
        usage = event.get("usage") or usage
    if ttft_s is None or usage is None:
        raise LocalStackError("the answer ended before its first token or without usage")
    return Answer(
        request_id=response.headers.get("x-request-id", ""),
        pod=response.headers.get(POD_HEADER, "?"),
        text="".join(pieces),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        ttft_s=ttft_s,
    )
