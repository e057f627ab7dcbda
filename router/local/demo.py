"""The demonstration: a running stack in, two tables out: kvroute, and round-robin on the same requests.

First a conversation (does it stay with the pod that remembers it?), then a burst of requests that share a
system prompt (do they spread by cost?). Speaks only HTTP, as any client would.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from router.local import demo_texts, stack_api
from router.local.chat_client import ChatAnswer, ChatClient
from router.local.errors import DemoError
from router.local.stack import StackPlan

_ANSWER_TOKENS = 32
# A person reads an answer before the next question. The last block's event needs a few milliseconds of that,
# or, where the machine has much else to do, some more.
_THINK_S = 0.25
_BURST_PER_POD = 4


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
