"""One engine's view as another router writes it: the third kind of source, beside `follower` and `inbox`.

Entries take the place of batches, their numbers that of sequence numbers, an epoch that of a process of the
engine; the same machine decides what is missing and whether a view belongs to the stream. Runs on the
subscriber's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from indexer.config import IndexerConfig, PodStream
from indexer.recovery import EngineStream
from indexer.replay import Batch, End
from indexer.snapshot import Fetched
from indexer.stream import StreamMachine
from indexer.view_parts import Outcome

if TYPE_CHECKING:
    from indexer.ingest import Ingest
    from indexer.relay_reader import RelayReader, StoredView
    from indexer.subscribe import Subscriber


class RelayedStream(EngineStream):
    """One engine that this router cannot reach: the server is asked where others ask the engine."""

    def __init__(
        self, stream: PodStream, config: IndexerConfig, sink: Ingest, reader: RelayReader, sockets: Subscriber
    ) -> None:
        super().__init__(stream, config, sink, sockets)
        self.epoch = ""
        self._reader = reader
        self._feed = None
        self._asked: object = None

    def up(self, epoch: str, now_s: float) -> None:
        """Somebody writes the engine's view in this epoch."""
        if self.epoch and epoch != self.epoch:
            self.restart("relay_changed")
        self.epoch = epoch
        self.link_up(now_s)

    def close(self) -> None:
        super().close()
        self._reader.forget(self.name)

    def _outcome(self, payloads: Sequence[bytes]) -> Outcome:
        return self._sink.apply_entries(self.name, payloads)

    def _new_machine(self) -> StreamMachine:
        return StreamMachine(
            replayable=True,
            snapshots=True,
            max_batches=self._config.recovery_batches_per_pod,
            max_bytes=self._config.recovery_bytes_per_pod,
        )

    def _ask(self, now_s: float) -> None:  # noqa: ARG002 (the server is asked at once)
        start, asked = self._machine.replay_start, object()
        if start is None:
            return
        self._asked = asked

        def deliver(entries: Sequence[Batch] | None) -> None:
            self._sockets.post(self, lambda now_s: self._on_entries(asked, entries, now_s))

        self._reader.replay(self.name, self.epoch, start, deliver)

    def _stop_replay(self) -> None:
        self._timers.pop(self._ask, None)
        self._asked = None

    def _on_entries(self, asked: object, entries: Sequence[Batch] | None, now_s: float) -> None:
        if asked is not self._asked:
            return
        self._asked = None
        if entries is None:
            self._retry(now_s)
        else:
            self._on_replayed([*entries, End()], now_s)

    def _request(self, deliver: Callable[[Fetched, float], None]) -> None:
        def delivered(view: StoredView | None) -> None:
            fetched = Fetched(None)
            # A view that is in doubt is not built from the same entries again.
            if view is not None and view.epoch == self.epoch and self._peers:
                number, digest = view.position
                snapshot = replace(view.snapshot, sequence=number, digest=digest)
                fetched = Fetched(snapshot, view.size_bytes, source="redis")
            self._sockets.post(self, lambda now_s: deliver(fetched, now_s))

        self._reader.fetch(self.name, delivered)


class RelayedStreams:
    """All engines that are followed through the relay, and what the relay asks of the subscriber's thread.

    Attributes:
        streams: By name in the index; on the subscriber's thread only.
    """

    def __init__(self, config: IndexerConfig, sink: Ingest, sockets: Subscriber) -> None:
        self.streams: dict[str, RelayedStream] = {}
        self._config = config
        self._sink = sink
        self._sockets = sockets

    def end_feed(self, engine: str, epoch: str) -> None:
        """Tell the relay nothing more of an engine in this epoch."""

        def act() -> None:
            owner = self._sockets.stream(engine)
            if owner is not None:
                owner.end_feed(epoch)

        self._sockets.call(act)

    def up(self, engine: str, epoch: str, reader: RelayReader) -> None:
        """Follow an engine through the relay from now on, unless it is connected."""

        def act() -> None:
            owner = self._sockets.stream(engine)
            if owner is None or owner.connected:
                return
            if engine not in self.streams:
                # Its view begins anew; what the connection had brought is forgotten with it.
                owner.restart("relayed")
                self.streams[engine] = RelayedStream(
                    owner.stream, self._config, self._sink, reader, self._sockets
                )
            self._sockets.guarded(self.streams[engine], partial(self.streams[engine].up, epoch))

        self._sockets.call(act)

    def down(self, engine: str) -> None:
        """Nothing comes of an engine through the relay any more, for now."""
        self._step(engine, RelayedStream.link_down)

    def live(self, engine: str, entries: Sequence[Batch]) -> None:
        self._step(engine, lambda stream, now_s: stream.live(entries, now_s))

    def end(self, engine: str) -> None:
        """Follow an engine no more through the relay, if it is: it is connected, or not to be followed."""
        if (relayed := self.streams.pop(engine, None)) is not None:
            relayed.close()
            self._sink.clear(engine, "relay_ended")

    def _step(self, engine: str, step: Callable[[RelayedStream, float], object]) -> None:
        def act() -> None:
            if (relayed := self.streams.get(engine)) is not None:
                self._sockets.guarded(relayed, partial(step, relayed))

        self._sockets.call(act)
