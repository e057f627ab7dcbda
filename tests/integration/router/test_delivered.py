"""Delivered cached tokens through a real Envoy: each API, streamed or not, whole, compressed and broken."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3

from tests.support.router.bench import TINY
from tests.support.router.doors import wait_until
from tests.support.router.envoy import Gateway, Mode, gateway
from tests.support.router.server import CUT, get

TEXT = "Tell me of a small harbour. " * 20
CHAT = [{"role": "user", "content": TEXT}]
# Path and request by API.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "completions": ("/v1/completions", {"prompt": TEXT}),
    "responses": ("/v1/responses", {"input": TEXT}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 9}),
}
STREAMED = ("chat", "completions")
# How a response may differ from a whole one with a usage, and how it is counted then.
FORMS = {"whole": "told", "silent": "untold", "gzip": "untold", "cut": "aborted"}


def usage(api: str, cached_tokens: int) -> dict[str, Any]:
    """Return the usage of an API's response."""
    if api == "messages":
        return {"input_tokens": 5, "cache_read_input_tokens": cached_tokens, "output_tokens": 3}
    prompt, answer = ("input", "output") if api == "responses" else ("prompt", "completion")
    return {
        f"{prompt}_tokens": 500,
        f"{answer}_tokens": 3,
        "total_tokens": 503,
        f"{prompt}_tokens_details": {"cached_tokens": cached_tokens},
    }


def reply(asked: bytes) -> bytes:
    """Return the response that a request describes in its field `user`."""
    body = json.loads(asked)
    api, form, cached_tokens = json.loads(body["user"])
    answer: dict[str, Any] = {"id": "x", "object": "response" if api == "responses" else "chat.completion"}
    answer |= {"type": "message", "role": "assistant", "content": []} if api == "messages" else {}
    answer |= {} if form == "silent" else {"usage": usage(api, cached_tokens)}
    if not body.get("stream"):
        return gzip.compress(json.dumps(answer).encode()) if form == "gzip" else json.dumps(answer).encode()
    word = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "fog " * 300}}]}
    events = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in (word, answer))
    return events + (CUT if form == "cut" else b"data: [DONE]\n\n")


def ask(served: Gateway, number: int) -> tuple[str, int]:
    """Send one request; return how its usage is to be counted, and the cached tokens that it tells."""
    draw = random.Random(number)
    api, form = draw.choice([*REQUESTS]), draw.choice(["whole", "whole", *FORMS])
    is_streamed = form == "cut" or (form != "gzip" and api in STREAMED and draw.random() < 0.5)
    if is_streamed:
        api = draw.choice(STREAMED)
    path, body = REQUESTS[api]
    cached_tokens = draw.randrange(0, 512, 16)
    described = {"user": json.dumps([api, form, cached_tokens]), "stream": is_streamed}
    try:
        response = served.post({"model": TINY, **body, **described}, path)
    except urllib3.exceptions.HTTPError:
        assert form == "cut"
    else:
        assert response.status == 200, response.data
    return FORMS[form], cached_tokens if form == "whole" else 0


def samples(served: Gateway, name: str) -> list[tuple[str, int]]:
    """Return the samples of a counter of the router with their outcomes."""
    page = get(served.router, "/metrics")[1].decode()
    found = re.findall(rf'^kvroute_router_{name}_total(?:{{outcome="(\w+)"}})? ([\d.e+]+)$', page, re.M)
    return [(outcome, int(float(number))) for outcome, number in found]


@pytest.mark.parametrize(("mode", "responses"), [("check_grpc", 2000), ("ext_proc usage", 300)])
def test_delivered_tokens_are_the_sum_of_what_clients_saw(tmp_path: Path, mode: Mode, responses: int) -> None:
    """Delivered tokens are the sum of all usages of 2,000 responses; unknown ones are counted by cause."""
    with gateway(tmp_path, mode) as served:
        for pod in served.pods:
            pod.answer_of = reply
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda number: ask(served, number), range(responses)))
        expected = Counter(outcome for outcome, _ in answers)

        def counted() -> Counter[str]:
            return Counter(
                {outcome: number for outcome, number in samples(served, "response_usage") if number}
            )

        wait_until(lambda: counted().total() == responses, "all log entries")
        assert counted() == expected
        ((_, delivered),) = samples(served, "delivered_cached_tokens")
    assert delivered == sum(cached_tokens for _, cached_tokens in answers)
