"""Requests through a router's ext_proc to an engine, as a gateway sends them: predicted beside delivered."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.app.server import RouterServer
from tests.support.loopback import HERE
from tests.support.router import doors
from tests.support.router.server import get

# The engine: path, forwarded body and headers that the router set, to the answer with its usage.
Serve = Callable[[str, dict[str, Any], dict[str, str]], dict[str, Any]]
# A speculative engine's hits are predicted low until its events have told whether it drops a block of each.
_LEARNING = 12
_APPLIED = "kvroute_indexer_event_lag_seconds_count"


@dataclass(frozen=True, slots=True)
class Served:
    """One request: the hit that the router predicted, and the hit that the engine reported."""

    answer: dict[str, Any]
    prompt: Sequence[int]
    predicted: int
    delivered: int
    view: str
    degraded: str | None
    causes: dict[str, int]  # tokens of the prompt by cause
    evicted_s_ago: float | None
    began_s: float  # Unix time, as in the engine's events
    ended_s: float

    @property
    def is_equal(self) -> bool:
        """Whether the prediction was right."""
        return self.degraded is None and self.predicted == self.delivered


class Door:
    """Gateway of one router."""

    def __init__(self, router: RouterServer, serve: Serve) -> None:
        self._router, self._serve = router, serve
        self._channel = grpc.insecure_channel(f"{HERE}:{router.ports['grpc']}")
        self._stub = pb_grpc.ExternalProcessorStub(self._channel)

    def ask(self, path: str, body: dict[str, Any], *, pods: Sequence[str] | None = None) -> Served:
        """Route a request to one of these pods (default: any), and have it served."""
        request_id, began_s = uuid.uuid4().hex, time.time()
        stream = doors.Stream(self._stub)
        stream.send(
            doors.headers(path=path, x_request_id=request_id),
            doors.body(json.dumps(body).encode(), subset=pods),
        )
        routed = {**doors.set_headers(stream.receive()), "x-request-id": request_id}
        routed.pop("content-length", None)  # of the exact bytes, which are encoded anew
        forwarded, ended = b"", [False]
        while not ended[-1]:
            chunk, ended = doors.streamed_bytes([stream.receive()])
            forwarded += chunk
        answer = self._serve(path, json.loads(forwarded), routed)
        status = doors.response_headers(status="200", content_type="application/json")
        stream.send(status, doors.response_body(json.dumps(answer).encode(), end=True))
        stream.rest()
        [record] = json.loads(get(self._router, f"/debug/decisions?request_id={request_id}")[1])["decisions"]
        return Served(
            answer=answer,
            prompt=prompt_ids(body, answer),
            predicted=record["predicted_cached_tokens"],
            delivered=answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0,
            view=record["candidates"][0]["view"],
            degraded=record["degraded"],
            causes=record["tokens_by_cause"],
            evicted_s_ago=record["evicted_s_ago"],
            began_s=began_s,
            ended_s=time.time(),
        )

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def differing(served: Sequence[Served], *, speculative: bool) -> list[Served]:
    """Return the requests whose prediction was wrong, without low ones while the view still learns."""
    learnt_from = sorted(served, key=lambda one: one.began_s)[:_LEARNING] if speculative else []
    low = [one for one in learnt_from if one.predicted < one.delivered]
    return [one for one in served if not one.is_equal and one not in low]


def applied_batches(router: RouterServer) -> int:
    """Return the number of event batches that a router has applied."""
    lines = get(router, "/metrics")[1].decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_APPLIED)))


def prompt_ids(body: dict[str, Any], answer: dict[str, Any]) -> list[int]:
    """Return the prompt's token ids, from the request or as the engine returned them; empty if unknown."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return prompt
    return answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids") or []
