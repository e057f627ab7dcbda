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
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import Any

import msgspec

from router.errors import ClusterError
from router.kube.client import KubeClient
from router.kube.problems import Reason

_log = logging.getLogger(__name__)

_COMPONENT = "kvroute-router"
_MESSAGE_CHARS_MAX = 1000
_RETRY_S = 5.0
_STOP_S = 2.0
_REFUSALS = (400, 401, 403, 404, 422)


class Subject(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The object that Events are about, as an Event's involvedObject."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str = ""


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
        # The newest message, and the monotonic time of its next try.
        self._waiting: dict[Reason, tuple[str, float]] = {}
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
                _, due_s = self._waiting.get(reason, ("", 0.0))
                self._waiting[reason] = message[:_MESSAGE_CHARS_MAX], due_s
            else:
                self._waiting.pop(reason, None)
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
                newest, _ = self._waiting.get(reason, ("", 0.0))
                if retry_s and newest:
                    self._waiting[reason] = newest, retry_s
                elif newest == message:
                    del self._waiting[reason]

    def _next(self) -> tuple[Reason, str] | None:
        """Wait for a message that is due, and return it; None once closing."""
        with self._wake:
            while not self._closing:
                next_one = min(self._waiting.items(), key=lambda item: item[1][1], default=None)
                if next_one is None:
                    self._wake.wait()
                    continue
                reason, (message, due_s) = next_one
                if (left_s := due_s - time.monotonic()) <= 0.0:
                    return reason, message
                self._wake.wait(left_s)
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
            "involvedObject": msgspec.to_builtins(subject),
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
