"""The thread that listens to all pods: one poller over every publisher, monitor and replay socket.

Streams to follow come in, from any thread; what they bring goes to the sink, on this thread. We connect to
pods, pods connect to us, or both. Each ready socket has a bounded turn, so that a flood from one pod costs
the others no more than that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import zmq

from common.repeated_log import RepeatedLog
from indexer.config import PODS_MAX, PodStream
from indexer.errors import ConfigError, ListenError, PeerError
from indexer.peers.service import PeerClient
from indexer.streams.bound import Inbox, Publisher
from indexer.streams.dialled import Follower
from indexer.streams.ingest import Ingest
from indexer.streams.recovery import EngineStream
from indexer.streams.relayed import RelayedStream, RelayReader
from indexer.streams.snapshot import SnapshotFetcher
from indexer.views.view_parts import ViewSnapshot

if TYPE_CHECKING:
    from indexer.streams.relay import Relay
    from indexer.streams.view_export import Feed

# Owners of watched sockets; whoever fails is reset.
Owner = EngineStream | Inbox

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_MAX_SOCKETS = 4 * PODS_MAX
_LONGEST_WAIT_S = 60.0
# A look at the sockets waits for the interpreter several times, and finds cold caches: in a flow of events it
# comes this much later, and still later the more there is to be taken, up to a bound.
_GATHER_S, _GATHER_MOST_S = 0.004, 0.015
_GATHER_FOR_TURN = 10.0

# Sockets, their signallers and monitors of some thousand pods.
_OPEN_FILES = 65_536


def gather_s(turn_s: float) -> float:
    """How long what comes is left to gather behind a turn that took so many seconds."""
    return min(_GATHER_MOST_S, max(_GATHER_S, _GATHER_FOR_TURN * turn_s))


def raise_open_files() -> None:
    """Each followed pod needs about five open files, far more than the usual soft limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Subscriber:
    """Follows a declared set of streams.

    Raises:
        ListenError: Pods cannot connect to `IndexerConfig.events_bind`.
    """

    def __init__(self, sink: Ingest, peers: PeerClient | None = None, relay: Relay | None = None) -> None:
        self.config, self.sink, self.clock = sink.config, sink, sink.clock
        self._closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvroute-events", daemon=True)
        others = {} if peers is None else {"peer": peers.ask}
        others |= {} if relay is None else {"redis": relay.reader.ask}
        self.has_peers = bool(others)
        self.fetcher = SnapshotFetcher(self.config, others)
        self._peers = peers
        # What other threads leave for ours.
        self._calls: deque[Callable[[], None]] = deque()
        # Below: the thread's own.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self.free_replays = self.config.concurrent_replays
        self._followers: dict[str, Follower] = {}
        self._poller = zmq.Poller()
        self._watched: dict[zmq.Socket[bytes], tuple[Owner, Callable[[float], None]]] = {}
        self._relayed: dict[str, RelayedStream] = {}
        self._inbox: Inbox | None = None
        # When the last turn ended, and when something is due next.
        self._turned_s = self._due_s = -math.inf
        self._gather_s = _GATHER_S
        try:
            if self.config.events_bind is not None:
                self._inbox = Inbox(self)
        except ListenError:
            self.close()
            raise

    @property
    def bound_endpoint(self) -> str | None:
        return None if self._inbox is None else self._inbox.endpoint

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends all subscriptions and the thread; idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.ident is not None:
            self._wake()
            self._thread.join()
        else:
            self._close_streams()
        if self._peers is not None:
            self._peers.close()
        self.fetcher.close()
        self.context.term()
        self._wake_in.close()
        self._wake_out.close()

    def follow(self, streams: Iterable[PodStream]) -> None:
        """Declares the full set of streams; one with a changed address or model begins anew.

        Raises:
            ConfigError: There are too many.
        """
        wanted = {stream.holder: stream for declared in streams for stream in declared.by_rank()}
        if len(wanted) > PODS_MAX:
            raise ConfigError(f"cannot follow {len(wanted)} pods, at most {PODS_MAX}")
        for stream in wanted.values():
            if stream.events_endpoint is None and self._inbox is None:
                raise ConfigError(f"stream of {stream.pod}: it connects to us, but events_bind is not set")
        self.call(partial(self._reconcile, wanted))

    def doubt(self, pod: str, reason: str, *, emptied: bool, seen_s: float | None = None) -> None:
        """Take another source's word that a pod's view is wrong: build it anew, or, if `emptied`, clear it.

        A view that has changed since `seen_s` (None: now), when the cache was seen to be empty, stays.
        """

        def act() -> None:
            for owner in self._all_streams():
                if owner.stream.pod == pod:
                    step = partial(owner.emptied_silently, reason, seen_s)
                    self.guarded(owner, step if emptied else partial(owner.doubted, reason))

        self.call(act)

    def export(self, engine: str, model: str | None = None, feed: Feed | None = None) -> Future[ViewSnapshot]:
        """Lists an engine's view; the future gets it, or a PeerError: nothing of the view changed then.

        Args:
            model: Which model it must serve; None: any.
            feed: Gets all changes from there on, for the relay; None: a peer asks.
        """
        told: Future[ViewSnapshot] = Future()

        def act() -> None:
            try:
                owner = self.stream(engine)
                if owner is None or model not in (None, owner.stream.model):
                    raise PeerError("not_followed", f"{engine} with the model {model!r} is not followed")
                owner.export(told, self.clock(), feed)
            except Exception as error:
                refusal = error if isinstance(error, PeerError) else PeerError("internal_error", repr(error))
                if not told.done() and (told.running() or told.set_running_or_notify_cancel()):
                    told.set_exception(refusal)

        self.call(act)
        return told

    def relay(
        self,
        engine: str,
        step: Callable[[RelayedStream, float], object],
        reader: RelayReader | None = None,
    ) -> None:
        """Have an engine's stream do something that is followed through the relay.

        Args:
            reader: Follows it there from now on, unless it is connected; None: nothing begins.
        """

        def act() -> None:
            owner = self.stream(engine)
            is_new = engine not in self._relayed
            if reader is not None and is_new and owner is not None and not owner.connected:
                # Its view begins anew; what the connection had brought is forgotten with it.
                owner.restart("relayed")
                self._relayed[engine] = RelayedStream(owner.stream, self, reader)
            if (relayed := self._relayed.get(engine)) is not None:
                self.guarded(relayed, partial(step, relayed))

        self.call(act)

    def end_relay(self, engine: str) -> None:
        """Follow an engine no more through the relay, if it is; on the thread."""
        if (relayed := self._relayed.pop(engine, None)) is not None:
            relayed.close()
            self.sink.clear(engine, "relay_ended")

    def call(self, act: Callable[[], None]) -> None:
        """Has something done on our thread, from any thread; it must not fail."""
        self._calls.append(act)
        self._wake()

    def watch(self, owner: Owner, watched: zmq.Socket[bytes], on_readable: Callable[[float], None]) -> None:
        """Calls back with the time whenever the socket can be read."""
        self._watched[watched] = (owner, on_readable)
        self._poller.register(watched, zmq.POLLIN)

    def unwatch(self, watched: zmq.Socket[bytes]) -> None:
        del self._watched[watched]
        self._poller.unregister(watched)

    def _wake(self) -> None:
        # A full pipe wakes it just as well; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        self._poller.register(self._wake_out, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        finally:
            self._close_streams()

    def _close_streams(self) -> None:
        for follower in self._followers.values():
            follower.close()
        if self._inbox is not None:
            self._inbox.close()

    def _turn(self) -> None:
        """Waits until something is ready or due, and lets everything that is have its turn.

        What follows a turn at once waits, so that more of it is taken together; what is due does not.
        """
        rest_s = min(self._due_s, self._turned_s + self._gather_s) - self.clock()
        if rest_s > 0:
            time.sleep(rest_s)
        wait_s = min(_LONGEST_WAIT_S, max(0.0, self._due_s - self.clock()))
        readable = self._poller.poll(math.ceil(wait_s * 1000))
        begun_s = self.clock()
        for ready, _ in readable:
            if isinstance(ready, zmq.Socket):
                # An earlier turn may have closed it.
                if ready in self._watched:
                    owner, on_readable = self._watched[ready]
                    self.guarded(owner, on_readable)
            else:
                self._wake_out.recv(4096)
                while self._calls:
                    self._calls.popleft()()
        self._turned_s = now_s = self.clock()
        self._gather_s = gather_s(now_s - begun_s)
        self._due_s = self._next_due_s()
        if self._due_s <= now_s:
            for stream in tuple(self._all_streams()):
                if stream.due_s <= now_s:
                    self.guarded(stream, stream.tick)
            self._due_s = self._next_due_s()

    def _next_due_s(self) -> float:
        return min((stream.due_s for stream in self._all_streams()), default=math.inf)

    def _streams(self) -> Iterator[Follower | Publisher]:
        yield from self._followers.values()
        if self._inbox is not None:
            yield from self._inbox.publishers.values()

    def stream(self, engine: str) -> Follower | Publisher | None:
        return next((owner for owner in self._streams() if owner.name == engine), None)

    def _all_streams(self) -> Iterator[EngineStream]:
        yield from self._streams()
        yield from self._relayed.values()

    def guarded(self, owner: Owner, step: Callable[[float], object]) -> None:
        """Has an owner do something; an error costs its view and nothing else."""
        try:
            step(self.clock())
        except Exception as error:
            _repeated.event(
                "stream_failed",
                owner.name,
                "error while following %s; its view is dropped",
                owner.name,
                level=logging.ERROR,
                error=error,
            )
            owner.reset(self.clock())

    def _reconcile(self, wanted: Mapping[str, PodStream]) -> None:
        dialled = {holder: stream for holder, stream in wanted.items() if stream.events_endpoint is not None}
        for holder, follower in tuple(self._followers.items()):
            if dialled.get(holder) != follower.stream:
                follower.close()
                self.end_relay(holder)
                del self._followers[holder]
                self.sink.closed(holder)
        if self._inbox is not None:
            awaited = {holder: stream for holder, stream in wanted.items() if holder not in dialled}
            elsewhere = frozenset(stream.pod for stream in dialled.values())
            self._inbox.declare(awaited, elsewhere, self.clock())
        for holder, stream in dialled.items():
            if holder not in self._followers:
                self.sink.opened(stream)
                self._followers[holder] = Follower(stream, self)
