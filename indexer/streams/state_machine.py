"""Sequence state machine of one engine's event stream: keeps the view EXACT, or reports that it is not.

Input: sequence numbers with payloads, link changes, snapshots and replay answers. Output: actions (apply,
clear, fetch, replay), in the order in which they must be executed. Pure: payloads are opaque, and the caller
does I/O and retries.

The sequence numbers of one engine process start at 0 and never go back.

- First connection: fetch a snapshot if one is offered, else replay all that the engine still has, from 0. A
  peer's view belongs to this engine process only if the engine still has the view's last batch, or sent it
  to us too; otherwise drop the view.
- Reconnection: request the last applied batch. If the engine returns the same batch, it is the same process,
  and its later batches are applied. If not, it is a new process.
- Gap: live batches wait while the missing ones are replayed. If they are unavailable, any part of the view
  may be wrong: clear it, and continue from a snapshot or from the available batches. If only the replay
  failed, repeat it later; the view is used until the answer arrives.
- A live sequence number goes back: a new process.
- New process: clear the view and build it as after the first connection. No batch of the old process is
  applied any more.

The view is EXACT while it has everything published since the cache was empty: from sequence 0, a snapshot or
an AllBlocksCleared on, or is proven to have it (`indexer.audit.late_view`). Blocks that the index evicts are
counted (evicted_blocks) and do not make it STALE.
The view is STALE when something is known to be missing; events are applied anyway. Without a replay socket
a view is EXACT only if it started at sequence 0, and it is cleared when the link is lost.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from xxhash import xxh3_128_digest

from indexer.index.contract import StreamState
from indexer.streams.actions import (
    BACKGROUND,
    CHECKS,
    FETCHES,
    Action,
    Apply,
    Clear,
    Fetch,
    Purpose,
    ReorderBuffer,
    Replay,
)

# Snapshots in a row that did not join up with the live batches, after which no more are fetched.
_UNUSABLE_SNAPSHOTS_MAX = 3


@dataclass(eq=False, kw_only=True)
class StreamMachine:
    """State machine of one engine's stream."""

    replayable: bool
    max_batches: InitVar[int]  # most live batches that wait for a replay
    max_bytes: InitVar[int]  # most payload bytes that wait; beyond either bound, all are dropped and replayed
    snapshots: bool = False
    first_sequence: int = 0  # of a process's first batch; 1 for llm-d's simulator

    def __post_init__(self, max_batches: int, max_bytes: int) -> None:
        self.gaps = 0
        self._up = False
        # Why the view is incomplete; None: it is complete.
        self._missing: str | None = "no_history"
        # Next sequence number to apply; None: any, because no batch of the stream was applied yet.
        self._next: int | None = None
        self._view = 0
        # Whether no batch was applied to the view; whether the engine last reported an empty cache.
        self._empty, self._reported_empty = True, False
        # Digest of the last applied batch; empty: none, or it was part of a snapshot.
        self._last_digest = b""
        # Whether the view is a peer's that is not verified to be of this engine process.
        self._unverified = False
        self._unusable_snapshots, self._last_live = 0, -1
        # Sequence number and digest of the last batch that this engine process sent to us.
        self._seen: tuple[int, bytes] | None = None
        self.waiting = ReorderBuffer(max_batches, max_bytes)
        # Running replay or fetch: its purpose; of a replay: its start, whether an answer arrived, and whether
        # the identity check passed.
        self._purpose: Purpose | None = None
        self._asked_from = 0
        self._answered = False
        self._confirmed = False

    @property
    def state(self) -> StreamState:
        if not self._up or self._purpose not in BACKGROUND:
            return StreamState.RECOVERING
        return StreamState.STALE if self._missing else StreamState.EXACT

    @property
    def reason(self) -> str:
        """Reason of the state; empty for EXACT."""
        if not self._up:
            return "link_down"
        if self._purpose not in BACKGROUND:
            return str(self._purpose)
        return self._missing or ""

    @property
    def replay_start(self) -> int | None:
        """Sequence number from which an interrupted replay must be repeated; None: no longer needed."""
        if self._purpose is None or self._purpose in FETCHES:
            return None
        expected = 0 if self._purpose is Purpose.RETRY else self._next or 0
        return expected - 1 if self._purpose in CHECKS and not self._confirmed else expected

    @property
    def last_batch(self) -> tuple[int, bytes] | None:
        """Sequence number and digest of the last batch in an EXACT view without a replay; else None."""
        if self.state is not StreamState.EXACT or self._purpose or self._next is None:
            return None
        return (self._next - 1, self._last_digest) if self._last_digest else None

    def can_repair(self, *, snapshots: bool = True) -> bool:
        """Return whether a STALE view may be completed by a replay, or by a snapshot if `snapshots`."""
        sources = (self.snapshots and snapshots) or self._retriable
        return sources and self._purpose is None and self.state is StreamState.STALE

    @property
    def _retriable(self) -> bool:
        return self.replayable and self._missing == "replay_failed"

    def link_up(self) -> list[Action]:
        self._up = True
        if self.replayable and self._last_digest:
            return self._ask(Purpose.IDENTITY)
        if self.snapshots:
            return self._fetch(Purpose.SNAPSHOT)
        if self.replayable:
            return self._ask(Purpose.HISTORY)
        # Nothing shows whether it is still the same process.
        return [] if self._next is None else self._restart("link_lost")

    def link_down(self) -> list[Action]:
        """Handle a lost connection: unreceived batches are lost; the view stays until reconnection."""
        self._up = False
        self._purpose = self._seen = None
        self._last_live = -1
        self.waiting.forget()
        return []

    def live(self, sequence: int, payload: bytes) -> list[Action]:
        self.cancel_tail_check()
        actions: list[Action] = [] if self._up else self.link_up()
        if sequence <= self._last_live:
            self.waiting.forget()
            self._seen = None
            actions = self._restart("sequence_went_back")
        self._last_live = sequence
        self.waiting.hold(sequence, payload)
        waits = self._purpose not in (None, Purpose.RETRY)
        return actions if waits else actions + self._drain(give_up=not self.replayable)

    def check_tail(self) -> list[Action]:
        """Check a quiet stream: whether the last applied batch is the last published one."""
        due = self._up and self.replayable and self._next is not None and self._purpose is None
        return self._ask(Purpose.TAIL) if due else []

    def cancel_tail_check(self) -> bool:
        """Cancel a running tail check; return whether one was running."""
        if was_tail := self._purpose is Purpose.TAIL:
            self._purpose = None
        return was_tail

    def repair(self) -> list[Action]:
        """Request a replay or snapshot for a STALE view. The view keeps serving meanwhile."""
        self.cancel_tail_check()
        if not self.can_repair():
            return []
        return self._fetch(Purpose.REPAIR) if self.snapshots else self._ask(Purpose.RETRY)

    def snapshot_begun(self) -> list[Action]:
        if self._purpose not in FETCHES:
            return []
        self._purpose = Purpose.SNAPSHOT
        actions = self._discard_view("snapshot")
        # The snapshot is complete; only batches that cannot be applied make the view STALE from here on.
        self._missing = None
        return actions

    def snapshot_batch(self, payload: bytes) -> list[Action]:
        if self._purpose is not Purpose.SNAPSHOT:
            return []
        self._empty = False
        return [Apply(payload, self._view)]

    def part_imported(self) -> bool:
        """Return whether the caller may add a part of a peer's snapshot, which it must then do."""
        if self._purpose is not Purpose.SNAPSHOT:
            return False
        self._empty = False
        return True

    def imported(self, sequence: int, digest: bytes) -> list[Action]:
        """Handle the end of a peer's snapshot, given its last batch."""
        if self._purpose is not Purpose.SNAPSHOT:
            return []
        self._purpose, self._next = None, sequence + 1
        self._last_digest, self._unverified = digest, True
        if self.replayable:
            return self._ask(Purpose.IDENTITY)
        if self._seen == (sequence, digest) or self.waiting.has(sequence, digest):
            self._unverified = False
            return self._drain(give_up=True)
        return self._identity_changed()

    def snapshot_ended(self, sequence: int) -> list[Action]:
        """Handle the end of an engine's snapshot; the stream continues with this sequence number."""
        if self._purpose is not Purpose.SNAPSHOT:
            return []
        self._purpose, self._next = None, sequence
        return self._drain(give_up=not self.replayable)

    def snapshot_failed(self) -> list[Action]:
        purpose, self._purpose = self._purpose, None
        if purpose is Purpose.REPAIR:
            actions = self._drain(give_up=not self.replayable)
            return actions + self._ask(Purpose.RETRY) if self._retriable and not self._purpose else actions
        if purpose is not Purpose.SNAPSHOT:
            self._purpose = purpose
            return []
        actions = self._discard_view("no_history", "snapshot_failed")
        if self.replayable:
            return actions + self._ask(Purpose.HISTORY)
        return actions + self._drain(give_up=True)

    def invalidate(self, reason: str) -> list[Action]:
        """Rebuild a view that is reported as wrong; not from a peer, whose view has the same events."""
        return self._restart(reason, peers=False) if self._up and self._purpose in BACKGROUND else []

    def emptied_silently(self, reason: str) -> list[Action]:
        """Clear the view of an engine that dropped its cache but has not published that yet.

        The view is STALE until the engine publishes it. The engine does so once, so a view that is known to
        be empty stays.
        """
        if not self._up or self._purpose not in BACKGROUND or self._empty or self._reported_empty:
            return []
        expected, digest = self._next, self._last_digest
        actions = self._discard_view(reason)
        self._next, self._last_digest, self._purpose = expected, digest, None
        return actions + self._drain(give_up=not self.replayable)

    def replayed(self, sequence: int, payload: bytes) -> list[Action]:
        if self._purpose is None or self._purpose in FETCHES:
            return []
        expected = self._next or 0
        first, self._answered = not self._answered, True
        if self._purpose in CHECKS and not self._confirmed:
            self._confirmed = sequence == expected - 1 and xxh3_128_digest(payload) == self._last_digest
            if not self._confirmed:
                return self._identity_changed()
            self._unverified = False
            return []
        actions: list[Action] = []
        if self._purpose is Purpose.RETRY:
            self._purpose = Purpose.HISTORY
            if self._missing is None or sequence > self.first_sequence:
                self._purpose, self._missing = None, self._missing and "history_truncated"
                return []
            actions, expected = self._discard_view("no_history", "history"), 0
        if sequence < expected:
            return []
        if sequence > expected:
            if not first:
                # A full queue dropped answers in mid-replay; they can be requested again.
                return self._ask(Purpose.GAP)
            if self._next is not None or sequence > self.first_sequence:
                actions = self._discard_view("history_truncated")
                if self._purpose is not Purpose.HISTORY and (fetch := self._fetch_again()):
                    return actions + fetch
        return [*actions, self._applied(sequence, payload)]

    def replay_ended(self) -> list[Action]:
        if self._purpose is None or self._purpose in FETCHES:
            return []
        purpose, self._purpose = self._purpose, None
        if purpose in CHECKS and not self._confirmed:
            return self._identity_changed()
        if self._next is None:
            self._next, self._missing = self.first_sequence, None
        fruitless = self._next == self._asked_from
        return self._drain(give_up=purpose is Purpose.GAP and fruitless)

    def replay_failed(self) -> list[Action]:
        """Handle a replay that failed in all of the caller's attempts."""
        if self._purpose is None or self._purpose in FETCHES:
            return []
        purpose, self._purpose = self._purpose, None
        if purpose in (Purpose.TAIL, Purpose.RETRY):
            return []
        actions = self._discard_view("replay_failed")
        fetch = [] if purpose is Purpose.HISTORY else self._fetch_again()
        return actions + (fetch or self._drain(give_up=True))

    def emptied(self, view: int, *, holds_nothing: bool = False) -> None:
        """Mark a view as complete: it is proven to be, or a batch reported an empty cache.

        Args:
            holds_nothing: The batch reported an empty cache and stored nothing behind it.
        """
        if view == self._view:
            self._missing = None
            self._reported_empty = holds_nothing

    def damaged(self, view: int, reason: str) -> None:
        if view == self._view:
            self._missing = self._missing or reason

    def _restart(self, reason: str, *, peers: bool = True) -> list[Action]:
        actions = self._discard_view("no_history", reason)
        if self.snapshots:
            return actions + self._fetch(Purpose.SNAPSHOT, peers=peers)
        return actions + self._ask(Purpose.HISTORY) if self.replayable else actions

    def _identity_changed(self) -> list[Action]:
        if not self._unverified:
            return self._restart("process_changed")
        # A peer may offer the same view again; it is asked a bounded number of times.
        actions = self._discard_view("no_history", "peer_unproven")
        if fetch := self._fetch_again():
            return actions + fetch
        return actions + (self._ask(Purpose.HISTORY) if self.replayable else self._drain(give_up=True))

    def _fetch(self, purpose: Purpose, *, peers: bool = True) -> list[Action]:
        self._purpose = purpose
        return [Fetch(peers)]

    def _fetch_again(self) -> list[Action]:
        self._unusable_snapshots += 1
        if not self.snapshots or self._unusable_snapshots > _UNUSABLE_SNAPSHOTS_MAX:
            return []
        return self._fetch(Purpose.SNAPSHOT)

    def _discard_view(self, lacking: str, reason: str | None = None) -> list[Action]:
        self._view += 1
        was_empty = self._empty
        self._next, self._missing, self._last_digest, self._empty = None, lacking, b"", True
        self._reported_empty = self._unverified = False
        return [] if was_empty else [Clear(reason or lacking)]

    def _ask(self, purpose: Purpose) -> list[Action]:
        self._purpose = purpose
        self._answered = False
        # Before the first batch there is nothing to check.
        self._confirmed = not self._last_digest
        self._asked_from = self._next or 0
        start = self.replay_start
        assert start is not None
        return [Replay(start)]

    def _applied(self, sequence: int, payload: bytes) -> Apply:
        if sequence <= self.first_sequence:
            self._missing = None
        self._empty = self._reported_empty = False
        self._unusable_snapshots = 0
        self._next = sequence + 1
        self._last_digest = xxh3_128_digest(payload)
        self._seen = sequence, self._last_digest
        return Apply(payload, self._view)

    def _drain(self, *, give_up: bool) -> list[Action]:
        """Apply waiting batches; `give_up`: skip missing ones, which are unavailable."""
        actions: list[Action] = []
        while True:
            sequence, payload = self.waiting.first
            if self._next is not None and sequence > self._next:
                self.gaps += not (give_up and self.replayable)
                if not give_up:
                    return actions + self._ask(Purpose.GAP)
                actions += self._discard_view("gap")
                if fetch := self._fetch_again():
                    return actions + fetch
                give_up = not self.replayable
            if payload is None:
                return actions
            self.waiting.pop()
            if self._fits(sequence):
                actions.append(self._applied(sequence, payload))

    def _fits(self, sequence: int) -> bool:
        """Return whether a batch is the next one; a process may start below the declared first number."""
        fresh = self._next == self.first_sequence and not self._last_digest
        return self._next is None or sequence == self._next or (fresh and sequence < self.first_sequence)
