"""The demonstration: a running stack in, two tables out: kvroute, and round-robin on the same requests.

First a conversation (does it stay with the pod that remembers it?), then a burst of requests that share a
system prompt (do they spread by cost?). Speaks only HTTP, as any client would.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import urllib3

from router.local import demo_texts, stack_api
from router.local.envoy_config import POD_HEADER
from router.local.stack import DemoError, StackPlan

_TIMEOUT = urllib3.Timeout(connect=5.0, read=60.0)
_EVENT_BYTES_MAX = 1 << 20
_ANSWER_TOKENS = 32
# A person reads an answer before the next question. The last block's event needs a few milliseconds of that,
# or, where the machine has much else to do, some more.
_THINK_S = 0.25
_BURST_PER_POD = 4


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answered request.

    Attributes:
        request_id: Envoy's id, by which the router explains its pick.
        pod: "ip:port" of the pod that answered.
        cached_tokens: As delivered, from `usage.prompt_tokens_details`.
        ttft_s: From sending the request to the first token's arrival.
    """

    request_id: str
    pod: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the demonstration; `predicted_tokens` and `reason` are None where nobody predicted."""

    name: str
    answer: ChatAnswer
    predicted_tokens: int | None
    reason: str | None


def run_demo(plan: StackPlan, check: Callable[[], None]) -> None:
    """Runs and prints the demonstration.

    Args:
        plan: The stack, which is up.
        check: Raises when a process of the stack has died.

    Raises:
        DemoError: A request failed, the conversation did not go where its cache is, or the burst herded.
    """
    _warm_up(plan)
    routed = _scenario(plan, plan.gateway_url, explain=True)
    check()
    _forget(plan)
    blind = _scenario(plan, plan.round_robin_url, explain=False)
    check()
    _forget(plan)
    print("\nkvroute: picked by what each pod's cache holds and by the work it has\n")
    print(_table(routed, explained=True))
    print("\nround-robin: the same requests, the same pods, caches emptied before\n")
    print(_table(blind, explained=False))
    print(f"\n{_summary(routed, blind)}", flush=True)
    _judge(routed, len(plan.pod_urls))


def _scenario(plan: StackPlan, url: str, *, explain: bool) -> list[Row]:
    client = ChatClient(url, plan.model_name)
    named = [(f"turn {at}", answer) for at, answer in enumerate(_converse(plan, client), 1)]
    burst = _burst(client, _BURST_PER_POD * len(plan.pod_urls))
    named += [(f"burst {at}", answer) for at, answer in enumerate(burst, 1)]
    if not explain:
        return [Row(name, answer, None, None) for name, answer in named]
    return [_explained(plan, name, answer) for name, answer in named]


def _converse(plan: StackPlan, client: ChatClient) -> list[ChatAnswer]:
    messages = demo_texts.first_messages()
    answers = []
    for question in demo_texts.QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(client.chat(messages, max_tokens=_ANSWER_TOKENS))
        messages.append({"role": "assistant", "content": answers[-1].text})
        _think(plan)
    return answers


def _think(plan: StackPlan) -> None:
    time.sleep(_THINK_S)
    stack_api.await_events(plan)


def _burst(client: ChatClient, count: int) -> list[ChatAnswer]:
    def send(number: int) -> ChatAnswer:
        return client.chat(demo_texts.burst_messages(number), max_tokens=_ANSWER_TOKENS)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(send, range(count)))


def _warm_up(plan: StackPlan) -> None:
    """Lets every pod run its code paths once, so that the tables compare caches and not first calls."""
    for url in plan.pod_urls.values():
        client = ChatClient(url, plan.model_name)
        for number in range(2):
            client.chat(demo_texts.burst_messages(1000 + number), max_tokens=4)
    _forget(plan)


def _forget(plan: StackPlan) -> None:
    stack_api.empty_caches(plan)
    _think(plan)


def _explained(plan: StackPlan, name: str, answer: ChatAnswer) -> Row:
    decision = stack_api.decision(plan, answer.request_id)
    return Row(name, answer, decision["predicted_cached_tokens"], decision["reason"])


def _table(rows: Sequence[Row], *, explained: bool) -> str:
    heads = ["request", "pod", "prompt", "predicted", "delivered", "TTFT ms"] + ["why this pod"] * explained
    lines = [
        [
            row.name,
            row.answer.pod,
            str(row.answer.prompt_tokens),
            "-" if row.predicted_tokens is None else str(row.predicted_tokens),
            str(row.answer.cached_tokens),
            f"{row.answer.ttft_s * 1000:.1f}",
            *([row.reason or ""] if explained else []),
        ]
        for row in rows
    ]
    widths = [max(len(line[at]) for line in [heads, *lines]) for at in range(len(heads))]
    # Numbers to the right, words to the left.
    return "\n".join(
        "  ".join(
            text.rjust(width) if 2 <= at <= 5 else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [heads, ["-" * width for width in widths], *lines]
    )


def _summary(routed: Sequence[Row], blind: Sequence[Row]) -> str:
    pods = {row.answer.pod for row in routed if row.name.startswith("turn")}
    spread = Counter(row.answer.pod for row in routed if row.name.startswith("burst"))
    exact = sum(row.predicted_tokens == row.answer.cached_tokens for row in routed)
    return "\n".join(
        [
            f"conversation: served by {', '.join(sorted(pods))}",
            f"burst:        {' + '.join(str(spread[pod]) for pod in sorted(spread))} requests "
            f"on {len(spread)} pods",
            f"prediction:   cached tokens predicted = delivered in {exact} of {len(routed)} requests",
            f"from cache:   {_cached_share(routed):.0%} of all prompt tokens, "
            f"round-robin {_cached_share(blind):.0%}",
            f"TTFT, turns:  {_mean_ttft_ms(routed, 'turn'):.0f} ms in the mean from the second on, "
            f"round-robin {_mean_ttft_ms(blind, 'turn'):.0f} ms",
            f"TTFT, burst:  {_mean_ttft_ms(routed, 'burst'):.0f} ms in the mean, "
            f"round-robin {_mean_ttft_ms(blind, 'burst'):.0f} ms",
        ]
    )


def _judge(rows: Sequence[Row], pods: int) -> None:
    """Fails the demonstration when a conversation lost its cache or a burst herded: something is broken."""
    if pods > 1 and len({row.answer.pod for row in rows if row.name.startswith("burst")}) == 1:
        raise DemoError("all requests of the burst went to one pod")
    turns = [row for row in rows if row.name.startswith("turn")]
    for row in turns[1:]:
        if row.answer.pod != turns[0].answer.pod:
            raise DemoError(
                f"{row.name} went to {row.answer.pod}, the conversation is on {turns[0].answer.pod}"
            )
        if row.predicted_tokens != row.answer.cached_tokens or not row.answer.cached_tokens:
            raise DemoError(
                f"{row.name}: {row.predicted_tokens} cached tokens were predicted, "
                f"{row.answer.cached_tokens} delivered"
            )


def _cached_share(rows: Sequence[Row]) -> float:
    return sum(row.answer.cached_tokens for row in rows) / sum(row.answer.prompt_tokens for row in rows)


def _mean_ttft_ms(rows: Sequence[Row], kind: str) -> float:
    times = [row.answer.ttft_s for row in rows if row.name.startswith(kind) and row.name != "turn 1"]
    return 1000 * sum(times) / len(times)


class ChatClient:
    """Sends chats to one gateway; safe to share between threads."""

    def __init__(self, base_url: str, model: str, *, connections: int = 32) -> None:
        self._base_url = base_url
        self._model = model
        self._pool = urllib3.PoolManager(maxsize=connections, block=True, timeout=_TIMEOUT, retries=False)

    def chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> ChatAnswer:
        """Sends one streaming request (greedy, no early end) and reads it to its end.

        Raises:
            DemoError: The request failed; the message holds the status and the body.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.monotonic()
        url = f"{self._base_url}/v1/chat/completions"
        try:
            response = self._pool.request("POST", url, json=body, preload_content=False)
            if response.status != 200:
                raise DemoError(
                    f"{url} answered {response.status}: {response.read(500).decode(errors='replace')}"
                )
            return self._read(response, started_s)
        except urllib3.exceptions.HTTPError as error:
            raise DemoError(f"{url}: {error}") from error

    def _read(self, response: urllib3.BaseHTTPResponse, started_s: float) -> ChatAnswer:
        ttft_s, pieces, usage = None, [], None
        for event in _server_sent(response):
            choices = event.get("choices") or []
            piece = choices[0].get("delta", {}).get("content") if choices else None
            if piece:
                ttft_s = ttft_s or time.monotonic() - started_s
                pieces.append(piece)
            usage = event.get("usage") or usage
        response.release_conn()
        if ttft_s is None or usage is None:
            raise DemoError("the answer's stream ended before its first token or without usage")
        return ChatAnswer(
            request_id=response.headers.get("x-request-id", ""),
            pod=response.headers.get(POD_HEADER, "?"),
            text="".join(pieces),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            ttft_s=ttft_s,
        )


def _server_sent(response: urllib3.BaseHTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each `data:` line as soon as it arrives."""
    buffered = b""
    while chunk := response.read1():
        *lines, buffered = (buffered + chunk).split(b"\n")
        if len(buffered) > _EVENT_BYTES_MAX:
            raise DemoError("an event of the answer's stream is larger than 1 MiB")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])
