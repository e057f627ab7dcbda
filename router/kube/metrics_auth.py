"""Who may read the metrics port: the cluster is asked, by the reader's bearer token.

A path and an Authorization header in, a refusal's status or None out. Two questions for each new token: whose
is it (TokenReview), and may they get this path (SubjectAccessReview). Answers are kept for a while; while the
API server is away nobody new is let in.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
from cachetools import TLRUCache

from indexer.repeated_log import RepeatedLog
from router.errors import ClusterError

if TYPE_CHECKING:
    from router.kube.client import KubeClient

_log = logging.getLogger(__name__)

_UNKNOWN, _FORBIDDEN, _AWAY = 401, 403, 503
_TOKEN_CHARS_MAX = 16_384
_KEPT = 1024
# As long as the reference's library keeps them.
_KEPT_IF_ALLOWED_S, _KEPT_IF_NOT_S = 60.0, 10.0


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _Status(msgspec.Struct):
    authenticated: bool = False
    allowed: bool = False
    user: _User = msgspec.field(default_factory=_User)


class _Review(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


class MetricsAuth:
    """Decides for each request; safe to share between threads."""

    def __init__(self, reviewer: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviewer = reviewer
        # By path and digest of the token.
        self._kept: TLRUCache[bytes, int | None] = TLRUCache(_KEPT, _kept_until_s, clock)
        self._lock = Lock()
        self._repeated = RepeatedLog(_log)

    def known(self, path: str, authorization: str | None) -> tuple[int | None] | None:
        """Return the answer of `refusal` in a tuple if the cluster need not be asked, else None."""
        token = _token(authorization)
        if token is None:
            return (_UNKNOWN,)
        try:
            with self._lock:
                return (self._kept[_key(path, token)],)
        except KeyError:
            return None

    def refusal(self, path: str, authorization: str | None) -> int | None:
        """The status to refuse with; None: the page may be shown."""
        known = self.known(path, authorization)
        if known is not None:
            return known[0]
        token = _token(authorization) or ""
        try:
            answer = self._ask(path, token)
        except (ClusterError, msgspec.MsgspecError) as error:
            self._repeated.event(
                "review_failed", "reviews", "the cluster cannot be asked who reads %s: %s", path[:100], error
            )
            return _AWAY
        with self._lock:
            self._kept[_key(path, token)] = answer
        return answer

    def _ask(self, path: str, token: str) -> int | None:
        known = self._status("TokenReview", {"token": token})
        if not known.authenticated:
            return _UNKNOWN
        user = known.user
        spec = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        return None if self._status("SubjectAccessReview", spec).allowed else _FORBIDDEN

    def _status(self, kind: str, spec: Mapping[str, Any]) -> _Status:
        return msgspec.json.decode(self._reviewer.review(kind, spec), type=_Review).status


def _kept_until_s(_key: bytes, answer: int | None, now_s: float) -> float:
    return now_s + (_KEPT_IF_ALLOWED_S if answer is None else _KEPT_IF_NOT_S)


def _token(authorization: str | None) -> str | None:
    """Return the bearer token; None if there is none, or it is too long."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= _TOKEN_CHARS_MAX else None


def _key(path: str, token: str) -> bytes:
    return hashlib.sha256(f"{path}\n{token}".encode("utf-8", "replace")).digest()
