"""What was promised of each pod's cache, and what of it must have come true by now: two counters per pod.

Dispatches and their ends come in. The engines' own counters of hits are held against them, see
`indexer.reconcile`. No clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from threading import Lock

from indexer.dispatched import DispatchKey

_REQUESTS_MAX = 100_000


class Promises:
    """Cached tokens that were predicted, by pod. Thread-safe.

    Args:
        max_requests: Most requests whose end is awaited; of the oldest nothing is counted.
    """

    def __init__(self, max_requests: int = _REQUESTS_MAX) -> None:
        self._max_requests = max_requests
        self._lock = Lock()
        self._open: OrderedDict[DispatchKey, tuple[str, int]] = OrderedDict()
        self._open_tokens: dict[str, int] = {}
        self._kept_tokens: dict[str, int] = {}

    def made(self, request: DispatchKey, pod: str, tokens: int) -> None:
        """The request was sent to this pod, which should find so many of its prompt tokens cached."""
        if not tokens:
            return
        with self._lock:
            if request in self._open:
                self._close(request)
            self._open[request] = (pod, tokens)
            self._open_tokens[pod] = self._open_tokens.get(pod, 0) + tokens
            if len(self._open) > self._max_requests:
                self._close(next(iter(self._open)))

    def due(self, request: DispatchKey) -> None:
        """The pod has looked its prompt up: its first token is there."""
        with self._lock:
            if (promise := self._close(request)) is not None:
                pod, tokens = promise
                self._kept_tokens[pod] = self._kept_tokens.get(pod, 0) + tokens

    def void(self, request: DispatchKey) -> None:
        """Nobody knows whether the pod has looked it up."""
        with self._lock:
            self._close(request)

    def answered_tokens(self, pod: str) -> int:
        """Predicted for all requests that the pod has answered."""
        return self._kept_tokens.get(pod, 0)

    def promised_tokens(self, pod: str) -> int:
        """The same with those that it has not answered yet."""
        with self._lock:
            return self._kept_tokens.get(pod, 0) + self._open_tokens.get(pod, 0)

    def keep(self, pods: Collection[str]) -> None:
        """Forgets all other pods."""
        with self._lock:
            for gone in self._kept_tokens.keys() - set(pods):
                del self._kept_tokens[gone]

    def _close(self, request: DispatchKey) -> tuple[str, int] | None:
        promise = self._open.pop(request, None)
        if promise is not None:
            pod, tokens = promise
            self._open_tokens[pod] -= tokens
            if not self._open_tokens[pod]:
                del self._open_tokens[pod]
        return promise
