"""Ends that will be told once more: by the response phase first, then by Envoy's access log.

The log's entry names only the request's id, under which another request may be in flight by then: it must not
end that one. Counts by id; bounded, and what no log tells in time is forgotten. Time comes in.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

# Longer than an access log is kept back.
_LIFE_S = 30.0


class Echoes:
    """What the log has yet to tell; safe to share between threads.

    Args:
        capacity: Ids remembered; the one that was told of longest ago goes first.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        # How often, and when the last time.
        self._awaited: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._awaited)

    def expect(self, request_id: str, now_s: float) -> None:
        """A request under this id has ended, as was seen here."""
        with self._lock:
            ends, _ = self._awaited.get(request_id, (0, now_s))
            self._awaited[request_id] = ends + 1, now_s
            self._awaited.move_to_end(request_id)
            if len(self._awaited) > self._capacity:
                self._awaited.popitem(last=False)

    def take(self, request_id: str, now_s: float) -> bool:
        """The log tells of an end under this id; whether it is one that was seen."""
        with self._lock:
            ends, told_s = self._awaited.pop(request_id, (0, now_s))
            if not ends or now_s - told_s > _LIFE_S:
                return False
            if ends > 1:
                self._awaited[request_id] = ends - 1, told_s
            return True
