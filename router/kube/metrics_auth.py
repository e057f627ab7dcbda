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
from typing import TYPE_CHECKING, Any

import msgspec
from cachetools import TLRUCache

from indexer.page_server import Lane
from indexer.repeated_log import RepeatedLog
from router.errors import ClusterError

if TYPE_CHECKING:
    from router.kube.client import KubeClient

_log = logging.getLogger(__name__)

_UNKNOWN, _FORBIDDEN, _AWAY = 401, 403, 503
_TOKEN_CHARS_MAX = 16_384
_KEPT = 1024
_NOT_KEPT = 0
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
    """Decides for each request; to be used by one event loop."""

    def __init__(self, reviewer: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviewer = reviewer
        # By path and digest of the token.
        self._kept: TLRUCache[bytes, int | None] = TLRUCache(_KEPT, _kept_until_s, clock)
        self._reviews = Lane("metrics-reviews")
        self._repeated = RepeatedLog(_log)

    def close(self) -> None:
        self._reviews.close()

    async def refusal(self, path: str, authorization: str | None) -> int | None:
        """Return the status to refuse with; None: the page may be shown."""
        token = _token(authorization)
        if token is None:
            return _UNKNOWN
        key = hashlib.sha256(f"{path}\n{token}".encode("utf-8", "replace")).digest()
        known = self._kept.get(key, _NOT_KEPT)
        if known != _NOT_KEPT:
            return known
        try:
            answer = self._kept[key] = await self._reviews.run(lambda: self._ask(path, token))
        except (ClusterError, msgspec.MsgspecError) as error:
            self._repeated.event(
                "review_failed", "reviews", "the cluster cannot be asked who reads %s: %s", path[:100], error
            )
            return _AWAY
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
