"""Stream machine with a simulated engine, both without sockets."""

from __future__ import annotations

from collections import deque

from xxhash import xxh3_128_digest

from indexer.index.contract import StreamState
from indexer.streams.actions import Action, Apply, Clear, Fetch, Replay
from indexer.streams.state_machine import StreamMachine

EXACT, RECOVERING, STALE = StreamState.EXACT, StreamState.RECOVERING, StreamState.STALE


def payload(life: int, sequence: int) -> bytes:
    """Return the payload that an engine process published under a sequence number."""
    return f"{life}:{sequence}".encode()


class Loop:
    """Engine, wire, machine and view.

    Attributes:
        view: Payloads applied since the last clear.
        current: Number of that view at the machine.
        clears: Reasons of all clears.
        wire: Live messages under way.
        answers: Replay answers under way; None is the end.
        fetching: Whether a snapshot request is pending.
        fetches: Number of snapshot requests.
        peer: Content of a peer's view, if snapshots come from a peer instead of the engine.
    """

    def __init__(
        self,
        *,
        replayable: bool = True,
        snapshots: bool = False,
        history: int = 100,
        max_batches: int = 100,
        first_sequence: int = 0,
    ) -> None:
        self.machine = StreamMachine(
            replayable=replayable,
            snapshots=snapshots,
            first_sequence=first_sequence,
            max_batches=max_batches,
            max_bytes=10_000,
        )
        self.history = history
        self.life = 0
        self.published = 0
        self.connected = False
        self.view: list[bytes] = []
        self.current = 0
        self.clears: list[str] = []
        self.replays: list[int] = []
        self.wire: deque[int] = deque()
        self.answers: deque[int | None] = deque()
        self.fetching = False
        self.fetches = 0
        self.peer: list[bytes] | None = None

    def publish(self, *, lost: bool = False) -> None:
        """Publish the engine's next batch."""
        if self.connected and not lost:
            self.wire.append(self.published)
        self.published += 1

    def connect(self) -> None:
        """Open the link."""
        self.connected = True
        self.perform(self.machine.link_up())

    def disconnect(self) -> None:
        """Close the link."""
        self.connected = False
        self.wire.clear()
        self.answers.clear()
        self.fetching = False
        self.perform(self.machine.link_down())

    def restart(self) -> None:
        """Replace the engine by a new process."""
        self.disconnect()
        self.life += 1
        self.published = 0

    def deliver(self) -> None:
        """Deliver one live message."""
        sequence = self.wire.popleft()
        self.perform(self.machine.live(sequence, payload(self.life, sequence)))

    def answer(self) -> None:
        """Deliver one replay answer."""
        sequence = self.answers.popleft()
        if sequence is None:
            self.perform(self.machine.replay_ended())
        else:
            self.perform(self.machine.replayed(sequence, payload(self.life, sequence)))

    def fail_replay(self) -> None:
        """Fail the replay for good."""
        self.answers.clear()
        self.perform(self.machine.replay_failed())

    def answer_fetch(self) -> None:
        """Deliver the requested snapshot: everything published until now, or a peer's view."""
        self.fetching = False
        self.perform(self.machine.snapshot_begun())
        if self.peer is not None:
            self._import(self.peer)
            return
        for applied in self.whole_life():
            self.perform(self.machine.snapshot_batch(applied))
        self.perform(self.machine.snapshot_ended(self.published))

    def peer_follows(self) -> None:
        """Let the peer receive everything that the engine's process published until now."""
        self.peer = self.whole_life()

    def _import(self, view: list[bytes]) -> None:
        """Deliver a peer's snapshot, its blocks in one part."""
        if not view:
            self.perform(self.machine.snapshot_failed())
        elif self.machine.part_imported():
            self.view = list(view)
            sequence = int(view[-1].decode().split(":")[1])
            self.perform(self.machine.imported(sequence, xxh3_128_digest(view[-1])))

    def fail_fetch(self) -> None:
        """Fail the snapshot request."""
        self.fetching = False
        self.perform(self.machine.snapshot_failed())

    def settle(self) -> None:
        """Deliver everything under way."""
        while self.wire or self.answers or self.fetching:
            if self.fetching:
                self.answer_fetch()
            elif self.answers:
                self.answer()
            else:
                self.deliver()

    def perform(self, actions: list[Action]) -> None:
        """Execute the machine's actions."""
        for action in actions:
            match action:
                case Apply(applied, view):
                    self.view.append(applied)
                    self.current = view
                case Clear(reason):
                    self.view.clear()
                    self.clears.append(reason)
                case Fetch():
                    self.answers.clear()
                    self.fetching = True
                    self.fetches += 1
                case Replay(start):
                    self.fetching = False
                    assert start == self.machine.replay_start or self.machine.replay_start is None
                    self.replays.append(start)
                    first = max(start, self.published - self.history)
                    self.answers = deque([*range(first, self.published), None])

    def whole_life(self) -> list[bytes]:
        """Return everything that the engine's present process has published."""
        return [payload(self.life, sequence) for sequence in range(self.published)]


def followed(published: int = 3, **settings: int | bool) -> Loop:
    """Return a loop that has followed a process from its start."""
    loop = Loop(**settings)
    loop.connect()
    loop.settle()
    for _ in range(published):
        loop.publish()
        loop.settle()
    return loop


def state_and_reason(loop: Loop) -> tuple[StreamState, str]:
    """Return the state and its reason."""
    return loop.machine.state, loop.machine.reason
