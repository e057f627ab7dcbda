"""Clients of a gateway: conversations, and per request the serving pod, the cached tokens, or the error.

They use plain HTTP without retries, so that every failed request is visible.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import urllib3

from kvroute.envoy_config import POD_HEADER

MODEL = "kvroute-tiny"
_TIMEOUT = urllib3.Timeout(connect=10.0, read=120.0)
_ANSWER_TOKENS = 16
_STORY = "The keeper of lighthouse {number} writes on day {day}: the sea was calm and the lamp burnt well. "
_serial = itertools.count(time.time_ns() % 1_000_000_000)


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request; times are of the monotonic clock.

    Attributes:
        status: HTTP status; 0 if no complete response arrived.
        pod: "ip:port" of the pod that it was sent to; None if unknown.
        cached_tokens: Cached tokens as reported by the model server.
        error: Body or exception of a failed request.
    """

    started_s: float
    ended_s: float
    status: int
    request_id: str = ""
    pod: str = ""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def failed(self) -> bool:
        """True if the request got no complete, successful response."""
        return self.status != 200


class Conversation:
    """One user who repeatedly asks questions about a text of its own.

    Args:
        url: URL of the gateway.
        sentences: Length of the text; about 20 tokens each.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = MODEL,
        sentences: int = 40,
        pool: urllib3.PoolManager | None = None,
    ) -> None:
        self._url, self._model = f"{url}/v1/chat/completions", model
        self._pool = pool or urllib3.PoolManager(maxsize=4, timeout=_TIMEOUT, retries=False)
        number = next(_serial)
        story = "".join(_STORY.format(number=number, day=day) for day in range(sentences))
        self._messages = [{"role": "system", "content": story}]

    def ask(self, *, max_tokens: int = _ANSWER_TOKENS) -> Answer:
        """Ask the next question and wait for the complete response."""
        question = {"role": "user", "content": f"What happened on day {len(self._messages)}?"}
        answer = self._send([*self._messages, question], max_tokens)
        if not answer.failed:
            self._messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def _send(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        body: dict[str, Any] = {"model": self._model, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        started_s = time.monotonic()
        try:
            response = self._pool.request("POST", self._url, json=body)
            ended_s = time.monotonic()
            head = {
                "request_id": response.headers.get("x-request-id", ""),
                "pod": response.headers.get(POD_HEADER, ""),
            }
            if response.status != 200:
                error = response.data[:500].decode(errors="replace")
                return Answer(started_s, ended_s, response.status, error=error, **head)
            found = response.json()
            return Answer(
                started_s,
                ended_s,
                200,
                text=found["choices"][0]["message"]["content"],
                prompt_tokens=found["usage"]["prompt_tokens"],
                cached_tokens=(found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
                **head,
            )
        except (urllib3.exceptions.HTTPError, ValueError, KeyError) as error:
            return Answer(started_s, time.monotonic(), 0, error=repr(error))


@dataclass(slots=True)
class Load:
    """Results of running clients so far."""

    answers: list[Answer] = field(default_factory=list)

    def assert_none_failed(
        self, *, but_on: str | None = None, picked: Callable[[str], str] | None = None
    ) -> None:
        """Assert that every request succeeded.

        Args:
            but_on: Pod ("ip:port") whose requests may have failed. The client does not know which pod sent a
                response that broke off.
            picked: Returns the pod for a request id. Used where the gateway got no connection to a pod.
        """

        def pod_of(answer: Answer) -> str:
            return answer.pod or (picked(answer.request_id) if picked is not None else "")

        failed = [answer for answer in self.answers if answer.failed]
        told = [
            f"began {answer.started_s - self.answers[0].started_s:.1f} s after the first, "
            f"took {answer.ended_s - answer.started_s:.1f} s: {answer.status} {pod_of(answer)} {answer.error}"
            for answer in failed
            if but_on is None or (answer.status != 0 and pod_of(answer) != but_on)
        ]
        assert not told, f"{len(told)} of {len(self.answers)} failed:\n" + "\n".join(told)

    def since(self, from_s: float) -> list[Answer]:
        """Return the requests that began at or after a time of the monotonic clock."""
        return [answer for answer in self.answers if answer.started_s >= from_s]

    def longest_gap_s(self, from_s: float) -> float:
        """Return the longest time after `from_s` without a successful response, in seconds."""
        ends = sorted(answer.ended_s for answer in self.answers if not answer.failed)
        ends = [from_s, *(end_s for end_s in ends if end_s > from_s)]
        return max((later - sooner for sooner, later in itertools.pairwise(ends)), default=0.0)


@contextmanager
def steady_load(url: str, *, clients: int = 4, think_s: float = 0.1, turns: int = 4) -> Iterator[Load]:
    """Run users while the context lasts; each starts a new conversation after this many turns.

    The results are complete when the context ends.
    """
    load, over = Load(), threading.Event()

    def user() -> None:
        pool = urllib3.PoolManager(maxsize=1, timeout=_TIMEOUT, retries=False)
        while not over.is_set():
            conversation = Conversation(url, sentences=20, pool=pool)
            for _ in range(turns):
                load.answers.append(conversation.ask())
                if over.wait(think_s):
                    break

    threads = [threading.Thread(target=user, name=f"user-{number}") for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        over.set()
        for thread in threads:
            thread.join()
