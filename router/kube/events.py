"""Kubernetes Events about problems: reasons and texts in, Events on the pool or on our own pod out.

A thread posts the newest message of each reason, so at most one message per reason waits. What cannot be
posted is tried again after some seconds, and others are posted meanwhile. The first failure is logged; the
problem itself was logged before.
"""

from __future__ import annotations

import hashlib
import logging
import os
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
    """

    def __init__(self, client: KubeClient, subject: Callable[[], Subject | None]) -> None:
        self._client = client
        self._subject = subject
        self._refused = False
        self._wake = Condition()
        self._waiting: dict[Reason, str] = {}
        self._has_news = False
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
            self._has_news = True
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                retry_s = _RETRY_S if self._waiting else None
                self._wake.wait_for(lambda: self._has_news or self._closing, retry_s)
                if self._closing:
                    return
                self._has_news = False
                waiting = dict(self._waiting)
            for reason, message in waiting.items():
                is_done = self._try(reason, message)
                with self._wake:
                    if is_done and self._waiting.get(reason) == message:
                        del self._waiting[reason]

    def _try(self, reason: Reason, message: str) -> bool:
        """Post a message; return False if it is to be tried again."""
        try:
            self._post(reason, message)
        except ClusterError as error:
            if not self._refused:
                self._refused = True
                _log.warning("Kubernetes Event cannot be posted: reason=%s error=%s", reason, error)
            return error.status in _REFUSALS
        except Exception:
            _log.exception("Event %s", reason)
        return True

    def _post(self, reason: Reason, message: str) -> None:
        subject = self._subject()
        if subject is None:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
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
