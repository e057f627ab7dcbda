"""Sequence state machine of one pod's event stream: keeps the view exact, or says that it is not.

Sequence numbers with payloads, link changes, snapshots and replay answers come in; what to apply, to clear,
to fetch and to replay goes out, in the order in which it must be done. Pure: payloads are opaque, sockets and
retries are the caller's.

A life is one process of the engine: its sequence starts at 0 and never goes back.

- The link comes up for the first time: a snapshot is fetched where one is offered. Without one, all that the
  engine still remembers is replayed, from 0. What a peer told of its view is of this life only if the engine
  still has the last batch in it, or sent it to us too; else it is dropped.
- It comes up again: the engine is asked for the last batch that was applied. If it returns that very batch
  it is the same process, and what it says after it is applied. If not, this is a new life.
- A batch is missing: live batches wait while the missing ones are replayed. If they cannot be had, what the
  view holds may be wrong anywhere: it is cleared, and goes on from a snapshot or what there is. If only the
  replay failed, all is asked for again later; the view is of use until the answer comes.
- The live sequence goes back: a new life.
- A new life: the view is cleared and built as after the first connection. Nothing of the old life is applied
  after that.

The view is EXACT while it holds all that was published since the cache was empty: from sequence 0, from a
snapshot or from an AllBlocksCleared on, as far as the index has room: what that evicts is counted
(evicted_blocks), not stale. It is STALE when something is known to lack; events are applied all the same.
Without a replay socket a view is EXACT only if it saw sequence 0, and is cleared when the link was lost.
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

from indexer.index.contract import StreamState
from indexer.streams.actions import (
    CHECKS,
    FETCHES,
    UNSEEN,
    Action,
    Apply,
    Clear,
    Fetch,
    Purpose,
    Replay,
    WaitingBatches,
)

# So many snapshots in a row that no live batch could follow: it is tried without.
_FRUITLESS_MAX = 3


class StreamMachine:
    """The state of one pod's stream.

    Args:
        max_batches: Most live batches that wait for a replay.
        max_bytes: Most payload bytes that wait. Beyond either, all that wait are dropped, and replayed later.
        first_sequence: Number of a life's first batch: 0, but llm-d's simulator begins with 1.
    """

    def __init__(
        self,
        *,
        replayable: bool,
        max_batches: int,
        max_bytes: int,
        snapshots: bool = False,
        first_sequence: int = 0,
    ) -> None:
        self.gaps = 0
        self._replayable = replayable
        self._snapshots = snapshots
        self._first = first_sequence
        self._up = False
        # What the view lacks; None: nothing.
        self._lacking: str | None = "no_history"
        # The sequence number to apply next; None: any, nothing of the stream is applied.
        self._next: int | None = None
        self._view = 0
        # Whether nothing was applied to it; whether the engine said last that its cache is empty.
        self._empty, self._told_empty = True, False
        # Of the last batch applied; empty: none was, or it came in a snapshot.
        self._last_digest = b""
        # What the view holds is a peer's, and nothing has shown yet that it is of this life.
        self._unproven = False
        self._fruitless, self._last_live = 0, -1
        # Number and digest of the last batch that this process of the engine sent to us.
        self._seen: tuple[int, bytes] | None = None
        self.waiting = WaitingBatches(max_batches, max_bytes)
        # What runs: why; of a replay from where, whether there was an answer, whether a check was passed.
        self._purpose: Purpose | None = None
        self._asked_from = 0
        self._answered = False
        self._confirmed = False

    @property
    def state(self) -> StreamState:
        if not self._up or self._purpose not in UNSEEN:
            return StreamState.RECOVERING
        return StreamState.STALE if self._lacking else StreamState.EXACT

    @property
    def reason(self) -> str:
        """Why the state is what it is; empty for EXACT."""
        if not self._up:
            return "link_down"
        if self._purpose not in UNSEEN:
            return str(self._purpose)
        return self._lacking or ""

    @property
    def replay_start(self) -> int | None:
        """From where a replay that broke off must be asked again; None: it is not wanted any more."""
        if self._purpose is None or self._purpose in FETCHES:
            return None
        expected = 0 if self._purpose is Purpose.RETRY else self._next or 0
        return expected - 1 if self._purpose in CHECKS and not self._confirmed else expected

    @property
    def mark(self) -> tuple[int, bytes] | None:
        """Number and digest of the last batch in an EXACT view at rest; None for any other view."""
        if self.state is not StreamState.EXACT or self._purpose or self._next is None:
            return None
        return (self._next - 1, self._last_digest) if self._last_digest else None

    def healable(self, *, snapshots: bool = True) -> bool:
        """Whether the view lacks what may be had later, of `snapshots` too, and nothing is under way."""
        sources = (self._snapshots and snapshots) or self._retriable
        return sources and self._purpose is None and self.state is StreamState.STALE

    @property
    def _retriable(self) -> bool:
        return self._replayable and self._lacking == "replay_failed"

    def link_up(self) -> list[Action]:
        self._up = True
        if self._replayable and self._last_digest:
            return self._ask(Purpose.IDENTITY)
        if self._snapshots:
            return self._fetch(Purpose.SNAPSHOT)
        if self._replayable:
            return self._ask(Purpose.HISTORY)
        # Nothing can tell whether it is still the same process.
        return [] if self._next is None else self._restart("link_lost")

    def link_down(self) -> list[Action]:
        """The connection was lost, with all that had not been received; the view stays for now."""
        self._up = False
        self._purpose = self._seen = None
        self._last_live = -1
        self.waiting.forget()
        return []

    def live(self, sequence: int, payload: bytes) -> list[Action]:
        self.forgo_tail()
        actions: list[Action] = [] if self._up else self.link_up()
        if sequence <= self._last_live:
            self.waiting.forget()
            self._seen = None
            actions = self._restart("sequence_went_back")
        self._last_live = sequence
        self.waiting.hold(sequence, payload)
        waits = self._purpose not in (None, Purpose.RETRY)
        return actions if waits else actions + self._drain(give_up=not self._replayable)

    def check_tail(self) -> list[Action]:
        """The stream fell quiet: find out whether the last batch applied is the last one published."""
        due = self._up and self._replayable and self._next is not None and self._purpose is None
        return self._ask(Purpose.TAIL) if due else []

    def forgo_tail(self) -> bool:
        """Gives up finding that out, if it is being found out; tells whether it was."""
        if was_tail := self._purpose is Purpose.TAIL:
            self._purpose = None
        return was_tail

    def heal(self) -> list[Action]:
        """Tries to get what a STALE view lacks; until it comes the view goes on as it is."""
        self.forgo_tail()
        if not self.healable():
            return []
        return self._fetch(Purpose.HEALING) if self._snapshots else self._ask(Purpose.RETRY)

    def snapshot_begun(self) -> list[Action]:
        if self._purpose not in FETCHES:
            return []
        self._purpose = Purpose.SNAPSHOT
        actions = self._lose("snapshot")
        # From here on only what cannot be applied lacks.
        self._lacking = None
        return actions

    def snapshot_batch(self, payload: bytes) -> list[Action]:
        if self._purpose is not Purpose.SNAPSHOT:
            return []
        self._empty = False
        return [Apply(payload, self._view)]

    def part_imported(self) -> bool:
        """Whether a part of a peer's snapshot may be added to the view; it is, then."""
        if self._purpose is not Purpose.SNAPSHOT:
            return False
        self._empty = False
        return True

    def imported(self, sequence: int, digest: bytes) -> list[Action]:
        """A peer's snapshot is complete; this is the last batch in it."""
        if self._purpose is not Purpose.SNAPSHOT:
            return []
        self._purpose, self._next = None, sequence + 1
        self._last_digest, self._unproven = digest, True
        if self._replayable:
            return self._ask(Purpose.IDENTITY)
        if self._seen == (sequence, digest) or self.waiting.has(sequence, digest):
            self._unproven = False
            return self._drain(give_up=True)
        return self._disproved()

    def snapshot_ended(self, sequence: int) -> list[Action]:
        """The snapshot is complete; the stream goes on with this number."""
        if self._purpose is not Purpose.SNAPSHOT:
            return []
        self._purpose, self._next = None, sequence
        return self._drain(give_up=not self._replayable)

    def snapshot_failed(self) -> list[Action]:
        purpose, self._purpose = self._purpose, None
        if purpose is Purpose.HEALING:
            actions = self._drain(give_up=not self._replayable)
            return actions + self._ask(Purpose.RETRY) if self._retriable and not self._purpose else actions
        if purpose is not Purpose.SNAPSHOT:
            self._purpose = purpose
            return []
        actions = self._lose("no_history", "snapshot_failed")
        if self._replayable:
            return actions + self._ask(Purpose.HISTORY)
        return actions + self._drain(give_up=True)

    def doubted(self, reason: str) -> list[Action]:
        """Something else tells that the view is wrong: it is built anew, of no peer's (same events)."""
        return self._restart(reason, peers=False) if self._up and self._purpose in UNSEEN else []

    def emptied_silently(self, reason: str) -> list[Action]:
        """Something else than the stream tells that the engine dropped its cache, and has not said so yet.

        The view is cleared and STALE until the engine says so. It does so once: a view known empty stays.
        """
        if not self._up or self._purpose not in UNSEEN or self._empty or self._told_empty:
            return []
        expected, digest = self._next, self._last_digest
        actions = self._lose(reason)
        self._next, self._last_digest, self._purpose = expected, digest, None
        return actions + self._drain(give_up=not self._replayable)

    def replayed(self, sequence: int, payload: bytes) -> list[Action]:
        if self._purpose is None or self._purpose in FETCHES:
            return []
        expected = self._next or 0
        first, self._answered = not self._answered, True
        if self._purpose in CHECKS and not self._confirmed:
            self._confirmed = sequence == expected - 1 and xxh3_128_digest(payload) == self._last_digest
            if not self._confirmed:
                return self._disproved()
            self._unproven = False
            return []
        actions: list[Action] = []
        if self._purpose is Purpose.RETRY:
            self._purpose = Purpose.HISTORY
            if self._lacking is None or sequence > self._first:
                self._purpose, self._lacking = None, self._lacking and "history_truncated"
                return []
            actions, expected = self._lose("no_history", "history"), 0
        if sequence < expected:
            return []
        if sequence > expected:
            if not first:
                # A full queue on the way dropped answers in mid-replay: what is lost can still be asked for.
                return self._ask(Purpose.GAP)
            if self._next is not None or sequence > self._first:
                actions = self._lose("history_truncated")
                if self._purpose is not Purpose.HISTORY and (fetch := self._fetch_again()):
                    return actions + fetch
        return [*actions, self._applied(sequence, payload)]

    def replay_ended(self) -> list[Action]:
        if self._purpose is None or self._purpose in FETCHES:
            return []
        purpose, self._purpose = self._purpose, None
        if purpose in CHECKS and not self._confirmed:
            return self._disproved()
        if self._next is None:
            self._next, self._lacking = self._first, None
        fruitless = self._next == self._asked_from
        return self._drain(give_up=purpose is Purpose.GAP and fruitless)

    def replay_failed(self) -> list[Action]:
        """The replay socket could not be asked, or broke off, as often as the caller was ready to try."""
        if self._purpose is None or self._purpose in FETCHES:
            return []
        purpose, self._purpose = self._purpose, None
        if purpose in (Purpose.TAIL, Purpose.RETRY):
            return []
        actions = self._lose("replay_failed")
        fetch = [] if purpose is Purpose.HISTORY else self._fetch_again()
        return actions + (fetch or self._drain(give_up=True))

    def emptied(self, view: int, *, holds_nothing: bool = False) -> None:
        """A batch applied to this view told that the engine's cache is empty (still is): nothing lacks."""
        if view == self._view:
            self._lacking = None
            self._told_empty = holds_nothing

    def damaged(self, view: int, reason: str) -> None:
        if view == self._view:
            self._lacking = self._lacking or reason

    def _restart(self, reason: str, *, peers: bool = True) -> list[Action]:
        actions = self._lose("no_history", reason)
        if self._snapshots:
            return actions + self._fetch(Purpose.SNAPSHOT, peers=peers)
        return actions + self._ask(Purpose.HISTORY) if self._replayable else actions

    def _disproved(self) -> list[Action]:
        if not self._unproven:
            return self._restart("process_changed")
        # A peer may say the same again and again: it is asked a few times, then done without.
        actions = self._lose("no_history", "peer_unproven")
        if fetch := self._fetch_again():
            return actions + fetch
        return actions + (self._ask(Purpose.HISTORY) if self._replayable else self._drain(give_up=True))

    def _fetch(self, purpose: Purpose, *, peers: bool = True) -> list[Action]:
        self._purpose = purpose
        return [Fetch(peers)]

    def _fetch_again(self) -> list[Action]:
        self._fruitless += 1
        if not self._snapshots or self._fruitless > _FRUITLESS_MAX:
            return []
        return self._fetch(Purpose.SNAPSHOT)

    def _lose(self, lacking: str, reason: str | None = None) -> list[Action]:
        self._view += 1
        was_empty = self._empty
        self._next, self._lacking, self._last_digest, self._empty = None, lacking, b"", True
        self._told_empty = self._unproven = False
        return [] if was_empty else [Clear(reason or lacking)]

    def _ask(self, purpose: Purpose) -> list[Action]:
        self._purpose = purpose
        self._answered = False
        # Before the first batch there is none to check.
        self._confirmed = not self._last_digest
        self._asked_from = self._next or 0
        start = self.replay_start
        assert start is not None
        return [Replay(start)]

    def _applied(self, sequence: int, payload: bytes) -> Apply:
        if sequence <= self._first:
            self._lacking = None
        self._empty = self._told_empty = False
        self._fruitless = 0
        self._next = sequence + 1
        self._last_digest = xxh3_128_digest(payload)
        self._seen = sequence, self._last_digest
        return Apply(payload, self._view)

    def _drain(self, *, give_up: bool) -> list[Action]:
        """Applies what waits; `give_up`: does without what is missing, which cannot be had."""
        actions: list[Action] = []
        while True:
            sequence, payload = self.waiting.first
            if self._next is not None and sequence > self._next:
                self.gaps += not (give_up and self._replayable)
                if not give_up:
                    return actions + self._ask(Purpose.GAP)
                actions += self._lose("gap")
                if fetch := self._fetch_again():
                    return actions + fetch
                give_up = not self._replayable
            if payload is None:
                return actions
            self.waiting.pop()
            if self._fits(sequence):
                actions.append(self._applied(sequence, payload))

    def _fits(self, sequence: int) -> bool:
        """Whether a batch is the next one; a life may begin with a lower number than expected."""
        fresh = self._next == self._first and not self._last_digest
        return self._next is None or sequence == self._next or (fresh and sequence < self._first)
