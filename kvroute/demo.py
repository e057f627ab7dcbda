"""Demonstration of a running stack: the same requests through kvroute and through round-robin, as two tables.

A conversation shows whether turns stay with the pod that cached it. A burst of requests with one system
prompt shows whether load is spread by cost. The answers are meaningless, because the model's weights are
random.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import urllib3

from kvroute.envoy_config import POD_HEADER
from kvroute.stack import LocalStackError, StackPlan, await_events, decision, empty_caches

_TIMEOUT = urllib3.Timeout(connect=5.0, read=60.0)
_HTTP = urllib3.PoolManager(maxsize=32, block=True, timeout=_TIMEOUT, retries=False)
_ANSWER_TOKENS = 32
# Pause of a user between two turns, in which the events of the last blocks arrive.
_PAUSE_S = 0.25
_BURST_PER_POD = 4

_SYSTEM_PROMPT = """You are the assistant of a team that runs language models for many users. You answer
in short sentences, you name the number behind every claim, and you say so when you do not know. The
team runs several model servers. Each keeps the keys and values of the tokens it has seen, in blocks of
sixteen tokens, until memory is needed for something newer. A request whose beginning a server has seen
before needs no work for that beginning, so it matters which server gets which request. A server that is
busy makes every request wait, so it matters as well how much work each one has. The router in front of
them weighs both, in seconds, and sends each request where its first token will come first. When someone
asks about a request, and see which server served it, how many of its tokens were found there, and what the
other servers would have cost. Never guess what a server holds: ask the index, which follows the
servers' own events, and say when its view is not exact."""

QUESTIONS = (
    "A user says that the first answer of the day is slow and the others are fast. What happens there?",
    "And why does the second question of that conversation wait less than the first, although it is longer?",
    "Suppose the server that holds the conversation is restarted meanwhile. What will the router do then?",
    "What would have happened with a balancer that sends each request to the next server in turn?",
    "Write down, in one sentence, what the team should watch from now on.",
)

_BURST_PROMPT = """You sort incident reports. Read the report, then answer with one word for its cause
(network, disk, memory, code, people) and one sentence that quotes the line which shows it. Do not use
anything but the report. When two causes fit, take the earlier one; when none fits, say so. The reports
come from machines and from people, they are not always in order, and some lines repeat what others said
before."""

_WHO = "the first server|the database|a user in Graz|the night shift|the scheduler|node seven|the cache"
_DID = "reported|lost|restarted|waited for|refused|copied|could not find|filled|dropped"
_WHAT = "its disk|a packet|the lock|forty requests|the old key|its memory|the backup|a page|the lease"
_WHEN = "at once|after two minutes|again|for an hour|before the update|during the copy|until noon"
# A sentence is about 13 tokens. Reports of a burst differ in length, as work does.
_BURST_SENTENCES = (18, 36, 72)
_CONVERSATION_SENTENCES = 110


@dataclass(slots=True)
class Answer:
    """Result of one request."""

    request_id: str  # from Envoy
    pod: str  # "ip:port"
    text: str
    prompt_tokens: int
    cached_tokens: int  # reported by the engine in `usage.prompt_tokens_details`
    ttft_s: float  # seconds from the request to the first token
    decision: Mapping[str, Any] = field(default_factory=dict)  # of the router; empty with round-robin


# Answers by kind of request: "turn" of the conversation, or "burst".
_Run = Mapping[str, Sequence[Answer]]
_Chat = Callable[[Sequence[Mapping[str, str]]], Answer]


def run_demo(plan: StackPlan, check: Callable[[], None]) -> None:
    """Run the demonstration and print its tables.

    Args:
        check: Called between its parts; raises a LocalStackError if a process of the stack has died.

    Raises:
        LocalStackError: A request failed, a turn missed its cache, or one pod got the whole burst.
    """
    _warm_up(plan)
    routed = _scenario(plan, plan.gateway_url, explain=True)
    check()
    _reset_caches(plan)
    round_robin = _scenario(plan, plan.round_robin_url, explain=False)
    check()
    _reset_caches(plan)
    print("\nkvroute: pods picked by cache content and load\n")
    print(_table(routed, explained=True))
    print("\nround-robin: the same requests and pods, after a cache reset\n")
    print(_table(round_robin, explained=False))
    print(f"\n{_summary(routed, round_robin)}", flush=True)
    _verify(routed, len(plan.pod_urls))


def first_messages() -> list[dict[str, str]]:
    """Return the first messages of the conversation: the system prompt with a long report."""
    return [{"role": "system", "content": f"{_SYSTEM_PROMPT}\n\n{_report(0, _CONVERSATION_SENTENCES)}"}]


def burst_messages(number: int) -> list[dict[str, str]]:
    """Return the messages of a burst request: the common system prompt and the report `number`."""
    return [
        {"role": "system", "content": _BURST_PROMPT},
        {"role": "user", "content": _report(number, _BURST_SENTENCES[number % len(_BURST_SENTENCES)])},
    ]


def _report(number: int, sentences: int) -> str:
    choose = random.Random(number).choice
    words = [texts.split("|") for texts in (_WHO, _DID, _WHAT, _WHEN)]
    lines = [f"{' '.join(map(choose, words))}." for _ in range(sentences)]
    return f"Report {number}. " + " ".join(lines)


def _scenario(plan: StackPlan, url: str, *, explain: bool) -> _Run:
    chat = partial(_chat, url, plan.model_name)
    run = {"turn": _converse(plan, chat), "burst": _burst(chat, _BURST_PER_POD * len(plan.pod_urls))}
    if explain:
        for answer in (*run["turn"], *run["burst"]):
            answer.decision = decision(plan, answer.request_id)
    return run


def _converse(plan: StackPlan, chat: _Chat) -> list[Answer]:
    messages = first_messages()
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(chat(messages))
        messages.append({"role": "assistant", "content": answers[-1].text})
        _pause(plan)
    return answers


def _pause(plan: StackPlan) -> None:
    time.sleep(_PAUSE_S)
    await_events(plan)


def _burst(chat: _Chat, count: int) -> list[Answer]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(chat, map(burst_messages, range(count))))


def _warm_up(plan: StackPlan) -> None:
    """Run every pod's code paths once, so that the tables do not measure first calls."""
    for url in plan.pod_urls.values():
        for number in range(2):
            _chat(url, plan.model_name, burst_messages(1000 + number), max_tokens=4)
    _reset_caches(plan)


def _reset_caches(plan: StackPlan) -> None:
    empty_caches(plan)
    _pause(plan)


def _table(run: _Run, *, explained: bool) -> str:
    heads = ["request", "pod", "prompt", "predicted", "delivered", "TTFT ms"] + ["why this pod"] * explained
    lines = [
        [
            f"{kind} {number}",
            answer.pod,
            str(answer.prompt_tokens),
            str(answer.decision.get("predicted_cached_tokens", "-")),
            str(answer.cached_tokens),
            f"{answer.ttft_s * 1000:.1f}",
            answer.decision.get("reason", ""),
        ][: len(heads)]
        for kind, answers in run.items()
        for number, answer in enumerate(answers, 1)
    ]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    # Numbers are right-aligned, words left-aligned.
    return "\n".join(
        "  ".join(
            text.rjust(width) if 2 <= at <= 5 else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [heads, ["-" * width for width in widths], *lines]
    )


def _summary(routed: _Run, round_robin: _Run) -> str:
    pods = {answer.pod for answer in routed["turn"]}
    spread = Counter(answer.pod for answer in routed["burst"])
    answers = [*routed["turn"], *routed["burst"]]
    exact = sum(answer.decision["predicted_cached_tokens"] == answer.cached_tokens for answer in answers)
    return "\n".join(
        [
            f"conversation: served by {', '.join(sorted(pods))}",
            f"burst:        {' + '.join(str(spread[pod]) for pod in sorted(spread))} requests "
            f"on {len(spread)} pods",
            f"prediction:   cached tokens predicted = delivered in {exact} of {len(answers)} requests",
            f"from cache:   {_cached_share(routed):.0%} of all prompt tokens, "
            f"round-robin {_cached_share(round_robin):.0%}",
            f"TTFT, turns:  {_mean_ttft_ms(routed['turn'][1:]):.0f} ms in the mean from the second on, "
            f"round-robin {_mean_ttft_ms(round_robin['turn'][1:]):.0f} ms",
            f"TTFT, burst:  {_mean_ttft_ms(routed['burst']):.0f} ms in the mean, "
            f"round-robin {_mean_ttft_ms(round_robin['burst']):.0f} ms",
        ]
    )


def _verify(run: _Run, pods: int) -> None:
    """Raise a LocalStackError if a turn missed its cache or one pod got the whole burst."""
    if pods > 1 and len({answer.pod for answer in run["burst"]}) == 1:
        raise LocalStackError("all requests of the burst went to one pod")
    first, *others = run["turn"]
    for number, answer in enumerate(others, 2):
        if answer.pod != first.pod:
            raise LocalStackError(f"turn {number} went to {answer.pod}, the conversation is on {first.pod}")
        predicted_tokens = answer.decision["predicted_cached_tokens"]
        if predicted_tokens != answer.cached_tokens or not answer.cached_tokens:
            raise LocalStackError(
                f"turn {number}: {predicted_tokens} cached tokens were predicted, "
                f"{answer.cached_tokens} delivered"
            )


def _cached_share(run: _Run) -> float:
    answers = [*run["turn"], *run["burst"]]
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


def _mean_ttft_ms(answers: Sequence[Answer]) -> float:
    return 1000 * fmean(answer.ttft_s for answer in answers)


def _chat(
    base_url: str, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int = _ANSWER_TOKENS
) -> Answer:
    """Send one streaming request (greedy, exactly `max_tokens` tokens) and read the whole answer."""
    url = f"{base_url}/v1/chat/completions"
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = time.monotonic()
    try:
        response = _HTTP.request("POST", url, json=body, preload_content=False)
        if response.status != 200:
            text = response.read(500).decode(errors="replace")
            raise LocalStackError(f"{url} answered {response.status}: {text}")
        return _read(response, started_s)
    except urllib3.exceptions.HTTPError as error:
        raise LocalStackError(f"{url}: {error}") from error


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
    response.release_conn()
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
