"""Session affinity: the last pod of each session and model, with expiry. Callers pass the time."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock


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
