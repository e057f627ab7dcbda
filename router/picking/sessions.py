"""Which pod a session was at last with each model: ids in, pods out, for a while.

Pure: time comes in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock

SESSION_ID_HEADER = "x-session-id"
# In these agents name their session; the first that a request carries counts.
_AGENT_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
_ID_CHARS_MAX = 256


class Sessions:
    """Sessions' last pods; safe to share between threads.

    Args:
        ttl_s: A session without a request for this long is forgotten.
        capacity: Sessions remembered, once for each of their models; the least recently used goes first.
    """

    def __init__(self, ttl_s: float = 300.0, capacity: int = 100_000) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._pods: OrderedDict[tuple[str | None, str], tuple[str, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pods)

    def pod_of(self, session: str, now_s: float, model: str | None = None) -> str | None:
        """The pod that the session was at last with this base model; None when forgotten."""
        key = (model, session)
        with self._lock:
            pod, heard_s = self._pods.get(key, (None, 0.0))
            if now_s - heard_s > self._ttl_s:
                self._pods.pop(key, None)
                return None
            return pod

    def moved(self, session: str, pod: str, now_s: float, model: str | None = None) -> None:
        key = (model, session)
        with self._lock:
            self._pods[key] = (pod, now_s)
            self._pods.move_to_end(key)
            if len(self._pods) > self._capacity:
                self._pods.popitem(last=False)


def session_of(headers: Mapping[str, str]) -> str | None:
    """Return the id of a request's session, from x-session-id or an agent's own header.

    None without one, or with one of senseless length.
    """
    session = headers.get(SESSION_ID_HEADER) or agent_session(headers)
    return session if session and len(session) <= _ID_CHARS_MAX else None


def cookie_value(header: str, name: str) -> str:
    """One cookie out of a request's cookie header; "" for none."""
    for pair in header.split(";"):
        key, equals, value = pair.strip().partition("=")
        if equals and key == name:
            return value.strip('"')
    return ""


def agent_session(headers: Mapping[str, str]) -> str | None:
    """Return the id of an agent's session; None: the request is no agent's."""
    return next((headers[name] for name in _AGENT_HEADERS if headers.get(name)), None)
