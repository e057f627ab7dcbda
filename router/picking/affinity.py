"""Pods of earlier requests: the last pod of each session, and the pods that keep state of clients.

Engines keep stored responses, conversations and files of the Responses API in their own memory, so a request
that names one must go to the pod that has it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from threading import Lock
from typing import Any

from msgspec.structs import replace

from router.errors import RequestError
from router.picking.candidates import is_allowed, no_allowed_endpoint
from router.pods.pod_set import PodSet, pod_life
from router.prompts.request import RequestKind, RouteRequest

HELD, GONE, UNKNOWN = "held", "gone", "unknown"
STATE_ID_CHARS_MAX = 256

_PATH_ID = re.compile(r"/((?:resp|conv|file)[-_][^/?]{1,250})(?:[/?]|$)")


class StatePods:
    """Bounded LRU table of the pod that keeps each state. Thread-safe.

    Args:
        count: Called with `HELD`, `GONE` or `UNKNOWN` for each request that names state.
        capacity: Maximum number of ids; the least recently used one is dropped.
    """

    def __init__(
        self, pods: PodSet, count: Callable[[str], None] = lambda _outcome: None, capacity: int = 100_000
    ) -> None:
        self._pods, self._count, self._capacity = pods, count, capacity
        # Address and life of the pod by id; a peer may name a pod that is not discovered here yet.
        self._holders: OrderedDict[str, tuple[str, tuple[str, ...] | None]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._holders)

    def learn(self, state_id: str, address: str) -> None:
        """Record that a pod keeps a state; ids of unusual length are ignored."""
        if not 0 < len(state_id) <= STATE_ID_CHARS_MAX:
            return
        pod = self._pods.current.get(address)
        with self._lock:
            self._holders[state_id] = address, pod_life(pod.entry) if pod is not None else None
            self._holders.move_to_end(state_id)
            if len(self._holders) > self._capacity:
                self._holders.popitem(last=False)

    def latest(self, count: int) -> list[tuple[str, str]]:
        """Return id and address of the latest states, latest first."""
        with self._lock:
            return [(name, address) for name, (address, _) in islice(reversed(self._holders.items()), count)]

    def bound(self, request: RouteRequest) -> RouteRequest:
        """Return the request with the pod of its state as the only candidate.

        Without known state it is returned unchanged, and the picked engine answers for itself.

        Raises:
            RequestError: 404: the pod is gone; 503: the gateway does not allow the pod.
        """
        outcome = None
        for param, state_id in _named_states(request):
            outcome = UNKNOWN
            with self._lock:
                if (holder := self._holders.get(state_id)) is None:
                    continue
                self._holders.move_to_end(state_id)
            pod = self._pods.current.get(holder[0])
            if pod is None or holder[1] not in (None, pod_life(pod.entry)):
                self._count(GONE)
                text = f"{param}: the server that kept '{state_id}' is gone, and its state with it"
                raise RequestError(404, f"{text}; send the input of all turns again", param)
            if not is_allowed(pod, request.candidates):
                raise no_allowed_endpoint()
            self._count(HELD)
            return replace(request, candidates=frozenset((pod.address,)))
        if outcome is not None:
            self._count(outcome)
        return request


def _named_states(request: RouteRequest) -> Iterator[tuple[str, str]]:
    """Yield field and id of each state that a request names."""
    if request.kind is RequestKind.PASSTHROUGH:
        if (found := _PATH_ID.search(request.headers.get(":path", ""))) is not None:
            yield "path", found[1]
        return
    body, named = request.body, list[tuple[str, object]]()
    conversation = body.get("conversation")
    named.append(("previous_response_id", body.get("previous_response_id")))
    named.append(("conversation", conversation.get("id") if isinstance(conversation, dict) else conversation))
    for item in _objects(body.get("input")):
        named += [("input", part.get("file_id")) for part in (item, *_objects(item.get("content")))]
    for param, value in named:
        if isinstance(value, str) and 0 < len(value) <= STATE_ID_CHARS_MAX:
            yield param, value


def _objects(value: object) -> Iterator[dict[str, Any]]:
    return (each for each in value if isinstance(each, dict)) if isinstance(value, list) else iter(())


class SessionPods:
    """LRU table of the last pod of each session and base model. Thread-safe.

    Args:
        ttl_s: Seconds after its last request at which an entry expires.
        capacity: Maximum number of entries; the least recently used one is evicted.
    """

    def __init__(self, ttl_s: float = 300.0, capacity: int = 100_000) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._pods: OrderedDict[tuple[str | None, str], tuple[str, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pods)

    def pod_of(self, session: str, now_s: float, model: str | None = None) -> str | None:
        """Return the last pod of a session with this base model; None if unknown or expired."""
        key = (model, session)
        with self._lock:
            pod, seen_s = self._pods.get(key, (None, 0.0))
            if now_s - seen_s > self._ttl_s:
                self._pods.pop(key, None)
                return None
            return pod

    def record(self, session: str, pod: str, now_s: float, model: str | None = None) -> None:
        key = (model, session)
        with self._lock:
            self._pods[key] = (pod, now_s)
            self._pods.move_to_end(key)
            if len(self._pods) > self._capacity:
                self._pods.popitem(last=False)
