"""Which pod a session was at last with each model: ids from a header or a cookie in, pods out, for a while.

A stay at that pod is worth some seconds to whoever switches this on: what the index cannot see, such as a
tool's state, or the cache where tokens are not known. Pure: time comes in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

_ID_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class SessionParameters:
    """Where session ids come from, and what they mean.

    Attributes:
        header: Name of the header, lower case; "" for none.
        cookie: Name of the cookie; "" for none. The header counts first.
        stay_s: How much later an answer may come so that a session stays at its pod.
        ttl_s: A session that was not heard of for this long is forgotten.
        capacity: Sessions remembered, once for each of their models; the longest unheard of goes first.
    """

    header: str = ""
    cookie: str = ""
    stay_s: float = 1.0
    ttl_s: float = 300.0
    capacity: int = 100_000


class Sessions:
    """Sessions' last pods; safe to share between threads."""

    def __init__(self, parameters: SessionParameters) -> None:
        self._parameters = parameters
        self._pods: OrderedDict[tuple[str | None, str], tuple[str, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._pods)

    @property
    def stay_s(self) -> float:
        """How much later an answer may come so that a session stays at its pod."""
        return self._parameters.stay_s

    def id_of(self, headers: Mapping[str, str]) -> str | None:
        """The session's id; None without one, or with one of senseless length."""
        known = self._parameters
        session = headers.get(known.header, "") if known.header else ""
        if not session and known.cookie:
            session = cookie_value(headers.get("cookie", ""), known.cookie)
        return session if 0 < len(session) <= _ID_CHARS_MAX else None

    def pod_of(self, session: str, now_s: float, model: str | None = None) -> str | None:
        """The pod that the session was at last with this base model; None when forgotten."""
        key = (model, session)
        with self._lock:
            pod, heard_s = self._pods.get(key, (None, 0.0))
            if now_s - heard_s > self._parameters.ttl_s:
                self._pods.pop(key, None)
                return None
            return pod

    def moved(self, session: str, pod: str, now_s: float, model: str | None = None) -> None:
        """The session's request for this base model was sent to this pod."""
        key = (model, session)
        with self._lock:
            self._pods[key] = (pod, now_s)
            self._pods.move_to_end(key)
            if len(self._pods) > self._parameters.capacity:
                self._pods.popitem(last=False)


def cookie_value(header: str, name: str) -> str:
    """One cookie out of a request's cookie header; "" for none."""
    for pair in header.split(";"):
        key, equals, value = pair.strip().partition("=")
        if equals and key == name:
            return value.strip('"')
    return ""
