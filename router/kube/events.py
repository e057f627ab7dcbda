"""Kubernetes Events about problems: reasons and texts in, Events on the pool or on our own pod out.

A thread posts the newest message of each reason, so at most one message per reason waits. A reason whose
post fails is tried again after some seconds, and others are posted meanwhile. The first failure is logged;
the problem itself was logged before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import Any

from router.errors import ClusterError
from router.kube.client import KubeClient
from router.kube.problems import Reason

_log = logging.getLogger(__name__)

_COMPONENT = "kvroute-router"
_MESSAGE_CHARS_MAX = 1000
_RETRY_S = 5.0
_STOP_S = 2.0
_REFUSALS = (400, 401, 403, 404, 422)


@dataclass(frozen=True, slots=True)
class Subject:
    """The object that Events are about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    def reference(self) -> dict[str, str]:
        known = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
        }
        return {key: value for key, value in known.items() if value}


class EventPoster:
    """Posts until closed.

    Args:
        subject: What an Event is about, asked when it is posted; None: about nothing, and none is posted.
        now: The time of day.
    """

    def __init__(
        self,
        client: KubeClient,
        subject: Callable[[], Subject | None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._subject = subject
        self._now = now
        self._refused = False
        self._wake = Condition()
        self._waiting: dict[Reason, str] = {}
        # Monotonic time of the next try, of reasons whose last try failed.
        self._retry_s: dict[Reason, float] = {}
        self._closing = False
        self._thread = Thread(target=self._run, name="kube-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends it, and drops what waits; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def post(self, reason: Reason, message: str) -> None:
        """Has an Event posted; "" when the problem is over. Never blocks."""
        with self._wake:
            if message:
                self._waiting[reason] = message[:_MESSAGE_CHARS_MAX]
            else:
                self._waiting.pop(reason, None)
                self._retry_s.pop(reason, None)
            self._wake.notify_all()

    def _run(self) -> None:
        while (waiting := self._next()) is not None:
            reason, message = waiting
            retry_s = 0.0
            try:
                self._post(reason, message)
            except ClusterError as error:
                if not self._refused:
                    self._refused = True
                    _log.warning("Kubernetes Event cannot be posted: reason=%s error=%s", reason, error)
                if error.status not in _REFUSALS:
                    retry_s = time.monotonic() + _RETRY_S
            except Exception:
                _log.exception("Event %s", reason)
            with self._wake:
                if retry_s and reason in self._waiting:
                    self._retry_s[reason] = retry_s
                elif self._waiting.get(reason) == message:
                    del self._waiting[reason]
                    self._retry_s.pop(reason, None)

    def _next(self) -> tuple[Reason, str] | None:
        """Wait for a message that is due, and return it; None once closing."""
        with self._wake:
            while not self._closing:
                now_s = time.monotonic()
                due_s = {reason: self._retry_s.get(reason, now_s) for reason in self._waiting}
                reason = min(due_s, key=due_s.__getitem__, default=None)
                if reason is not None and due_s[reason] <= now_s:
                    return reason, self._waiting[reason]
                self._wake.wait(None if reason is None else due_s[reason] - now_s)
        return None

    def _post(self, reason: Reason, message: str) -> None:
        subject = self._subject()
        if subject is None:
            return
        now = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        # The same words about the same object from the same router are one Event, counted up.
        reporter = os.environ.get("POD_NAME", _COMPONENT)
        words = "\0".join([subject.uid, reason, message, reporter])
        name = f"{subject.name[:200]}.{hashlib.sha256(words.encode()).hexdigest()[:16]}"
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": subject.namespace},
            "involvedObject": subject.reference(),
            "reason": str(reason),
            "message": message,
            "type": "Warning",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": reporter,
        }
        self._client.post_event(subject.namespace, event)
        self._refused = False
