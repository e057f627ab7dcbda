"""grpc.ServicerContext for the calls served here: what a servicer may ask and say of its call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, NoReturn

import grpc

from router.h2.call_head import CallHead, Metadata

_log = logging.getLogger(__name__)


class CallAborted(Exception):  # noqa: N818 (no error: it is what the servicer asked for)
    """A servicer ended its call by abort()."""


class CallCancelled(grpc.RpcError):
    """The client is gone; raised to whoever waits for its messages."""


class CallContext(grpc.ServicerContext):
    """One call, as its servicer sees it; of TLS it tells nothing.

    Args:
        cancel: Ends the call towards the client.

    Attributes:
        code, details, trailing: What the call ends with.
        initial: Metadata to send in front of the first answer.
    """

    def __init__(self, head: CallHead, peer: str, cancel: Callable[[], object]) -> None:
        self._head = head
        self._peer = peer
        self._cancel = cancel
        self._end_s = None if head.timeout_s is None else time.monotonic() + head.timeout_s
        self._callbacks: list[Callable[[], object]] = []
        self._lock = Lock()
        self._is_over = False
        self.code = grpc.StatusCode.OK
        self.details_text = ""
        self.trailing: Metadata = ()
        self.initial: Metadata = ()

    def over(self) -> None:
        """The call has ended; callbacks are called."""
        with self._lock:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        # It leads back to the call, which shall go with its last user and not wait for a collector.
        self._cancel = _nothing
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("a call's callback failed: %s", self._head.path)

    def is_active(self) -> bool:
        return not self._is_over

    def time_remaining(self) -> float | None:  # type: ignore[override]
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def cancel(self) -> bool:
        self._cancel()
        return True

    def add_callback(self, callback: Callable[[], object]) -> bool:
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
            return not self._is_over

    def invocation_metadata(self) -> Metadata:
        return self._head.metadata

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, bytes]:
        return {}

    def set_compression(self, compression: grpc.Compression) -> None:
        """Answers are never compressed, which a server may choose."""

    def disable_next_message_compression(self) -> None:
        pass

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        self.initial = tuple(initial_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = tuple(trailing_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self.code = code if code is not grpc.StatusCode.OK else grpc.StatusCode.UNKNOWN
        self.details_text = details
        raise CallAborted

    def abort_with_status(self, status: Any) -> NoReturn:
        self.trailing = tuple(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details_text = details


def _nothing() -> None:
    pass
