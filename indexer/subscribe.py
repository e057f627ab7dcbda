"""The thread that listens to all pods: one poller over every publisher, monitor and replay socket.

Streams to follow come in, from any thread; what they bring goes to the sink, on this thread. Each ready
socket has a bounded turn, so that a flood from one pod costs the others no more than that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import zmq

from indexer.config import PODS_MAX, IndexerConfig, PodStream
from indexer.errors import ConfigError
from indexer.follower import Follower
from indexer.sink import StreamSink

_log = logging.getLogger(__name__)

_MAX_SOCKETS = 4 * PODS_MAX
_LONGEST_WAIT_S = 60.0


class Subscriber:
    """Follows a declared set of streams.

    Args:
        config: Bounds and times.
        sink: Where the streams end.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, config: IndexerConfig, sink: StreamSink, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._sink = sink
        self._clock = clock
        self._lock = threading.Lock()
        self._wanted: Mapping[str, PodStream] = {}
        self._closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvroute-events", daemon=True)
        # Below: the thread's own.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self.free_replays = config.concurrent_replays
        self._followers: dict[str, Follower] = {}
        self._poller = zmq.Poller()
        self._watched: dict[zmq.Socket[bytes], tuple[Follower, Callable[[float], None]]] = {}

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends all subscriptions and the thread; idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.ident is not None:
            self._wake()
            self._thread.join()
        self.context.term()
        self._wake_in.close()
        self._wake_out.close()

    def follow(self, streams: Iterable[PodStream]) -> None:
        """Declares the full set of streams; one with a changed address or model begins anew.

        Raises:
            ConfigError: There are too many.
        """
        wanted = {stream.pod: stream for stream in streams}
        if len(wanted) > PODS_MAX:
            raise ConfigError(f"cannot follow {len(wanted)} pods, at most {PODS_MAX}")
        with self._lock:
            self._wanted = wanted
        self._wake()

    def watch(
        self, owner: Follower, watched: zmq.Socket[bytes], on_readable: Callable[[float], None]
    ) -> None:
        """See `Sockets.watch`."""
        self._watched[watched] = (owner, on_readable)
        self._poller.register(watched, zmq.POLLIN)

    def unwatch(self, watched: zmq.Socket[bytes]) -> None:
        """See `Sockets.unwatch`."""
        del self._watched[watched]
        self._poller.unregister(watched)

    def _wake(self) -> None:
        # A full pipe wakes it just as well.
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        self._poller.register(self._wake_out, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        finally:
            for follower in self._followers.values():
                follower.close()

    def _turn(self) -> None:
        """Waits until something is ready or due, and lets everything that is have its turn."""
        due_s = min((follower.due_s for follower in self._followers.values()), default=math.inf)
        wait_s = min(_LONGEST_WAIT_S, max(0.0, due_s - self._clock()))
        for ready, _ in self._poller.poll(math.ceil(wait_s * 1000)):
            if isinstance(ready, zmq.Socket):
                # An earlier turn may have closed it.
                if ready in self._watched:
                    follower, on_readable = self._watched[ready]
                    self._guarded(follower, on_readable)
            else:
                self._wake_out.recv(4096)
                self._reconcile()
        now_s = self._clock()
        for follower in self._followers.values():
            if follower.due_s <= now_s:
                self._guarded(follower, follower.tick)

    def _guarded(self, follower: Follower, step: Callable[[float], None]) -> None:
        try:
            step(self._clock())
        except Exception:
            _log.exception("error while following %s; its view is dropped", follower.stream.pod)
            follower.reset(self._clock())

    def _reconcile(self) -> None:
        with self._lock:
            wanted = self._wanted
        for pod, follower in tuple(self._followers.items()):
            if wanted.get(pod) != follower.stream:
                follower.close()
                del self._followers[pod]
                self._sink.closed(pod)
        for pod, stream in wanted.items():
            if pod not in self._followers:
                self._sink.opened(stream)
                self._followers[pod] = Follower(stream, self._config, self._sink, self)
