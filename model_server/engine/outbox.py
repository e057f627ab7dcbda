"""Outbox of the engine: cache events and outputs of computed steps, queued until they are sent."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from model_server.kv_cache.request import Request
from model_server.kv_events.events import KVEvent, PublishEvents
from model_server.requests import EngineCoreOutput

logger = logging.getLogger(__name__)

OutputCallback = Callable[[EngineCoreOutput], None]


class Outbox:
    """Events and outputs in the order of their creation: at most those of one step and of aborts."""

    def __init__(self, publish: PublishEvents | None) -> None:
        self._publish = publish  # None: events are discarded
        # For events, the request is None.
        self._queue: deque[tuple[Request | None, Callable[[Any], object], Any]] = deque()
        self.failed: list[Request] = []  # whose callback raised before the last output; the caller empties it

    def add_events(self, events: Sequence[KVEvent]) -> None:
        if events and self._publish is not None:
            self._queue.append((None, self._publish, events))

    def add_output(self, request: Request, on_output: OutputCallback, output: EngineCoreOutput) -> None:
        self._queue.append((request, on_output, output))

    def send(self) -> None:
        """Publish and send everything, in order. Exceptions of callbacks are logged."""
        while self._queue:
            request, callback, argument = self._queue.popleft()
            try:
                callback(argument)
            except Exception:
                if request is None:
                    logger.exception("event publisher failed, cache events lost: events=%d", len(argument))
                    continue
                logger.warning("output callback failed: request=%s", request.request_id, exc_info=True)
                if argument.finish_reason is None:
                    self.failed.append(request)
