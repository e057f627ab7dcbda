"""One engine's view as another router writes it: the third kind of source, beside `follower` and `inbox`.

Entries take the place of batches, their numbers that of sequence numbers, an epoch that of a process of the
engine; the same machine decides what is missing and whether a view belongs to the stream. Runs on the
subscriber's thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from indexer.applied import Outcome
from indexer.config import IndexerConfig, PodStream
from indexer.errors import PeerError
from indexer.recovery import Recovery
from indexer.relay_feed import Position
from indexer.replay import Batch
from indexer.snapshot import Fetched
from indexer.stream import StreamMachine
from indexer.stream_actions import Action, Fetch, Replay
from indexer.view_parts import ViewSnapshot

if TYPE_CHECKING:
    from indexer.ingest import Ingest
    from indexer.relay_reader import RelayReader, StoredView
    from indexer.subscribe import Subscriber


class _RelayedRecovery(Recovery):
    """A recovery that asks the server where others ask the engine."""

    def __init__(
        self,
        stream: PodStream,
        config: IndexerConfig,
        sink: Ingest,
        sockets: Subscriber,
        owner: RelayedStream,
    ) -> None:
        super().__init__(stream, config, sink, sockets, owner)
        self._feed = None
        self._source_of_entries = owner
        self._asked: object = None

    def _outcome(self, payloads: Sequence[bytes]) -> Outcome:
        return self._sink.apply_entries(self._stream.holder, payloads)

    def _new_machine(self) -> StreamMachine:
        return StreamMachine(
            replayable=True,
            snapshots=True,
            max_batches=self._config.recovery_batches_per_pod,
            max_bytes=self._config.recovery_bytes_per_pod,
        )

    def _ask(self, now_s: float) -> None:  # noqa: ARG002 (the server is asked at once)
        self._ask_s = math.inf
        start, asked = self._machine.replay_start, object()
        if start is None:
            return
        self._asked, owner = asked, self._source_of_entries

        def deliver(entries: Sequence[Batch] | None) -> None:
            self._sockets.post(owner, lambda now_s: self._on_entries(asked, entries, now_s))

        owner.reader.replay(self._stream.holder, owner.epoch, start, deliver)

    def _stop_replay(self) -> None:
        self._ask_s, self._asked = math.inf, None

    def _on_entries(self, asked: object, entries: Sequence[Batch] | None, now_s: float) -> None:
        if asked is not self._asked:
            return
        self._asked = None
        if entries is None:
            self._retry(now_s)
            return
        actions: list[Action] = []
        for entry in entries:
            actions += self._machine.replayed(entry.sequence, entry.payload)
            if any(isinstance(action, Replay | Fetch) for action in actions):
                break
        else:
            self._sink.replay(self._stream.holder, "completed")
            actions += self._machine.replay_ended()
        self._perform(actions, now_s)

    def _request(self, deliver: Callable[[Fetched, float], None]) -> None:
        owner = self._source_of_entries

        def delivered(view: StoredView | None) -> None:
            fetched = Fetched(None)
            # A view that is in doubt is not built from the same entries again.
            if view is not None and view.epoch == owner.epoch and self._peers:
                number, digest = view.position
                snapshot = replace(view.snapshot, sequence=number, digest=digest)
                fetched = Fetched(snapshot, view.size_bytes, source="redis")
            self._sockets.post(owner, lambda now_s: deliver(fetched, now_s))

        owner.reader.fetch(self._stream.holder, delivered)


class RelayedStream:
    """One engine that this router cannot reach.

    Args:
        stream: The engine's stream.
        config: Bounds and times.
        sink: Where its view is, which this object has for itself.
        reader: Fetches views and entries.
        sockets: Brings what was fetched back to this thread.

    Attributes:
        epoch: The epoch that is followed.
    """

    def __init__(
        self, stream: PodStream, config: IndexerConfig, sink: Ingest, reader: RelayReader, sockets: Subscriber
    ) -> None:
        self.stream = stream
        self.reader = reader
        self.epoch = ""
        self.recovery = _RelayedRecovery(stream, config, sink, sockets, self)

    @property
    def name(self) -> str:
        """The engine, for the log."""
        return self.stream.holder

    @property
    def due_s(self) -> float:
        """When `tick` must be called next."""
        return self.recovery.due_s

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self.recovery.tick(now_s)

    def up(self, epoch: str, now_s: float) -> None:
        """Somebody writes the engine's view in this epoch."""
        if self.epoch and epoch != self.epoch:
            self.recovery.reset("relay_changed")
        self.epoch = epoch
        self.recovery.link_up(now_s)

    def reset(self, _now_s: float) -> None:
        """Begin anew after an error of our own."""
        self.recovery.reset()

    def close(self) -> None:
        """End it; the view stays."""
        self.recovery.stop()
        self.reader.forget(self.name)


class RelayedStreams:
    """All engines that are followed through the relay, and what the relay asks of the subscriber's thread.

    Args:
        config: Bounds.
        sink: Where views are.
        sockets: Whose thread it is.

    Attributes:
        streams: By name in the index; on the subscriber's thread only.
    """

    def __init__(self, config: IndexerConfig, sink: Ingest, sockets: Subscriber) -> None:
        self.streams: dict[str, RelayedStream] = {}
        self._config = config
        self._sink = sink
        self._sockets = sockets

    def feed(self, engine: str, epoch: str) -> Future[tuple[Position, ViewSnapshot]]:
        """List an engine's view for the relay, and tell it all changes from there on.

        The future gets the place in the epoch where the view was listed, and the view, or a PeerError.

        Args:
            engine: Its name in the index.
            epoch: Which epoch begins, or goes on.
        """
        told: Future[tuple[Position, ViewSnapshot]] = Future()
        listed: Future[ViewSnapshot] = Future()

        def act() -> None:
            with refused_to(told):
                owner = self._sockets.stream(engine)
                if owner is None:
                    raise PeerError("not_followed", f"{engine} is not followed")
                position = owner.recovery.feed(listed, epoch, self._sockets.now_s())
                listed.add_done_callback(partial(pass_on, position))

        def pass_on(position: Position, listed: Future[ViewSnapshot]) -> None:
            with refused_to(told):
                told.set_result((position, listed.result()))

        self._sockets.call(act)
        return told

    def end_feed(self, engine: str, epoch: str) -> None:
        """Tell the relay nothing more of an engine in this epoch."""

        def act() -> None:
            owner = self._sockets.stream(engine)
            if owner is not None:
                owner.recovery.end_feed(epoch)

        self._sockets.call(act)

    def up(self, engine: str, epoch: str, reader: RelayReader) -> None:
        """Follow an engine through the relay from now on, unless it is connected."""

        def act() -> None:
            owner = self._sockets.stream(engine)
            if owner is None or owner.connected:
                return
            if engine not in self.streams:
                # Its view begins anew; what the connection had brought is forgotten with it.
                owner.recovery.reset("relayed")
                self.streams[engine] = RelayedStream(
                    owner.stream, self._config, self._sink, reader, self._sockets
                )
            self._sockets.post(self.streams[engine], partial(self.streams[engine].up, epoch))

        self._sockets.call(act)

    def down(self, engine: str) -> None:
        """Nothing comes of an engine through the relay any more, for now."""
        self._sockets.call(lambda: self._step(engine, lambda stream: stream.recovery.link_down))

    def live(self, engine: str, entries: Sequence[Batch]) -> None:
        """Entries of an engine came through the relay."""
        self._sockets.call(lambda: self._step(engine, lambda stream: partial(stream.recovery.live, entries)))

    def end(self, engine: str) -> None:
        """Follow an engine no more through the relay, if it is: it is connected, or not to be followed."""
        if (relayed := self.streams.pop(engine, None)) is not None:
            relayed.close()
            self._sink.clear(engine, "relay_ended")

    def _step(self, engine: str, step_of: Callable[[RelayedStream], Callable[[float], object]]) -> None:
        if (relayed := self.streams.get(engine)) is not None:
            self._sockets.post(relayed, step_of(relayed))


@contextmanager
def refused_to(told: Future[Any]) -> Iterator[None]:
    """Hands an error on to whoever waits: nothing of the view changed, it is only not told."""
    try:
        yield
    except Exception as error:
        refusal = error if isinstance(error, PeerError) else PeerError("internal_error", repr(error))
        if not told.done() and (told.running() or told.set_running_or_notify_cancel()):
            told.set_exception(refusal)
