"""Checks through the real gateway: picks and tokens by real requests, body limits, and a long stream."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvroute.doctor.engine import Card, cached_tokens
from kvroute.doctor.findings import Report
from kvroute.envoy_config import POD_HEADER
from kvroute.http_client import Answer, Http, UnreachableError
from kvroute.router_pages import PagesError, RouterPages

_BODIES_MIB = (1, 2)
_REQUESTS = 6
_WORDS = 120  # more tokens than that: several blocks
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CONFIRMED_S, _POLL_S = 5.0, 0.2
_STREAM_TOKENS, _STREAM_PROMPT_TOKENS = 4096, 64
_STREAM_END = b"[DONE]"
_DEGRADED = ("passthrough", "no_tokenizer", "tokenizer_unavailable")


@dataclass(slots=True)
class GatewayCheck:
    """Checks of one gateway."""

    url: str
    pages: RouterPages | None  # of its router; None: checks that need decisions are left out
    http: Http
    report: Report
    card: Card  # model of the requests
    pods: int  # pods that serve the model
    stream_s: float  # a stream that is still open after this time is long enough
    path: str = _CHAT

    def run(self) -> None:
        """Run all checks."""
        try:
            answer = self._ask(_text())
            if answer.status in (400, 404):
                # A model without a chat template.
                self.path = _COMPLETIONS
                answer = self._ask(_text())
            if answer.status != 200:
                case = "no_router" if answer.status >= 500 else "rejects"
                self.report.add("gateway", case, why=answer.text)
                return
            self.report.add("gateway", "answers")
            self.report.judge_clock(answer.headers.get("date"))
            if self.pages is None:
                self.report.add("picks", "no_decisions")
            elif self._obeys_picks(answer):
                self._check_tokens()
            for mebibytes in _BODIES_MIB:
                self._check_body(mebibytes)
            self._check_stream()
        except UnreachableError as error:
            self.report.add("gateway", "hung" if error.is_hung else "refused", why=error)

    def _ask(self, text: str, **more: Any) -> Answer:
        prompt: dict[str, Any] = {"prompt": text}
        if self.path == _CHAT:
            prompt = {"messages": [{"role": "user", "content": text}]}
        body = {"model": self.card.id, "max_tokens": 1, **prompt, **more}
        return self.http.ask(f"{self.url}{self.path}", body)

    def _decision(self, answer: Answer) -> dict[str, Any] | None:
        """Return the router's record of a response's request; None if it has none."""
        try:
            return self.pages.decision(answer.headers.get("x-request-id", "")) if self.pages else None
        except PagesError:
            return None

    def _obeys_picks(self, first: Answer) -> bool:
        """Compare the pods that served with the picked ones; return whether tokens can be compared."""
        if not first.headers.get("x-request-id"):
            self.report.add("picks", "no_id")
            return False
        outcomes = Counter[str]()
        for answer in (first, *(self._ask(_text()) for _ in range(_REQUESTS - 1))):
            if (decision := self._decision(answer)) is None:
                self.report.add("picks", "not_asked")
                return False
            served = answer.headers.get(POD_HEADER)
            outcomes["no_pod" if served is None else "same" if served == decision["pod"] else "other"] += 1
        if outcomes["other"]:
            case = "ignored"
        elif outcomes["no_pod"]:
            case = "no_pod"
        else:
            case = "one_pod" if self.pods < 2 else "obeyed"
        self.report.add("picks", case, other=outcomes["other"], count=_REQUESTS, header=POD_HEADER)
        return not outcomes["other"]

    def _check_tokens(self) -> None:
        """Compare the router's tokens with the engine's: their count, then the blocks that it stored."""
        text, add = _text(), partial(self.report.add, "tokens", model=self.card.id)
        answer = self._ask(text)
        decision, count = self._decision(answer), answer.get("usage", "prompt_tokens")
        if decision is None or not isinstance(count, int):
            return
        if degraded := decision["degraded"]:
            add(degraded if degraded in _DEGRADED else "degraded", why=degraded)
            return
        if decision["prompt_tokens"] != count:
            add("count", ours=decision["prompt_tokens"], theirs=count)
            return
        confirmed, delivered, ends_s = 0, None, time.monotonic() + _CONFIRMED_S
        # The chat template alone may fill a block, which other tokens of the text do not change.
        while confirmed <= count // 2 and time.monotonic() < ends_s:
            time.sleep(_POLL_S)
            answer = self._ask(text)
            delivered = cached_tokens(answer)
            confirmed = _confirmed_tokens(self._decision(answer))
        case = "equal" if confirmed > count // 2 else "not_cached" if delivered == 0 else "other"
        add(case, count=count, confirmed=confirmed)

    def _check_body(self, mebibytes: int) -> None:
        """Send a short prompt in a large body: the padding costs no tokens."""
        answer = self._ask("Hello", user="x" * (mebibytes << 20))
        # The router names its limit in bytes; Envoy's own answers name none.
        case = "router" if "bytes" in answer.text else "gateway"
        case = "passes" if answer.status == 200 else "engine" if POD_HEADER in answer.headers else case
        self.report.add("body", case, size=mebibytes, why=answer.text)

    def _check_stream(self) -> None:
        """Read a stream for `stream_s`; a cut one ends without its last event."""
        tokens = max(1, (self.card.max_model_len or _STREAM_TOKENS) - _STREAM_PROMPT_TOKENS)
        body = {"model": self.card.id, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True}
        began_s, tail, why = time.monotonic(), b"", "it ended without its last event"
        try:
            with self.http.open(f"{self.url}{_COMPLETIONS}", {**body, "stream": True}) as response:
                if response.status != 200:
                    self.report.add("stream", "rejected", status=response.status)
                    return
                while (piece := response.read1(1 << 16)) and time.monotonic() - began_s < self.stream_s:
                    tail = (tail + piece)[-64:]
        except UnreachableError as error:
            why, tail = str(error), b""
        lasted_s = time.monotonic() - began_s
        case = "whole" if _STREAM_END in tail else "open" if lasted_s >= self.stream_s else "cut"
        self.report.add("stream", case, lasted_s=lasted_s, why=why)


def _confirmed_tokens(decision: dict[str, Any] | None) -> int:
    """Return the tokens of the prompt that the picked pod's events have confirmed."""
    if decision is None:
        return 0
    held = (one["cached_tokens_by_tier"] for one in decision["candidates"] if one["pod"] == decision["pod"])
    return sum(tokens for each in held for tier, tokens in each.items() if tier != "speculative")


def _text() -> str:
    """Return a text that no cache holds."""
    return " ".join(secrets.token_hex(2) for _ in range(_WORDS))
