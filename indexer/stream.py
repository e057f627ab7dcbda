"""Sequence state machine of one pod's event stream: keeps the view exact, or says that it is not.

Sequence numbers with payloads, link changes and replay answers come in; what to apply, to clear and to
replay goes out, in the order in which it must be done. Pure: payloads are opaque, sockets and retries are
the caller's.

A life is one process of the engine: its sequence starts at 0 and never goes back.

- The link comes up for the first time: all that the engine still remembers is replayed, from 0.
- It comes up again: the engine is asked for the last batch that was applied. If it returns that very batch
  it is the same process, and what it says after it is applied. If not, this is a new life.
- A batch is missing: live batches wait while the missing ones are replayed. If the engine has them no more,
  what the view holds may be wrong anywhere: it is cleared, and goes on from what there is.
- The live sequence goes back: a new life.
- A new life: the view is cleared and replayed from 0. Nothing of the old life is applied after that.

The view is EXACT while it holds all that was published since the cache was empty: from sequence 0 on, or
from an AllBlocksCleared on, as far as the index has room: what that evicts is counted (evicted_blocks), not
stale. It is STALE when something is known to lack; events are applied all the same.
Without a replay socket a view is EXACT only if it saw sequence 0, and is cleared when the link was lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from xxhash import xxh3_128_digest


class StreamState(StrEnum):
    """How far the index's view of one pod can be trusted."""

    EXACT = "EXACT"
    RECOVERING = "RECOVERING"
    STALE = "STALE"


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this batch to the view; `view` tells news of this view from news of one that was dropped."""

    payload: bytes
    view: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop all that the view holds, because of `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the replay socket for everything from this sequence number on; a replay before is given up."""

    start: int


Action = Apply | Clear | Replay


class _Purpose(StrEnum):
    """Why a replay runs."""

    HISTORY = "history"
    GAP = "gap"
    IDENTITY = "identity"
    # As IDENTITY, though nothing is in doubt: a stream that fell quiet may have lost its last batches
    # unnoticed.
    TAIL = "tail"


_CHECKS = (_Purpose.IDENTITY, _Purpose.TAIL)


class StreamMachine:
    """The state of one pod's stream.

    Args:
        replayable: Whether the pod has a replay socket.
        max_batches: Most live batches that wait for a replay.
        max_bytes: Most payload bytes that wait. Beyond either, all that wait are dropped, and replayed later.

    Attributes:
        gaps: How often batches were found missing.
    """

    def __init__(self, *, replayable: bool, max_batches: int, max_bytes: int) -> None:
        self.gaps = 0
        self._replayable = replayable
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._up = False
        # What the view lacks; None: nothing.
        self._lacking: str | None = "no_history"
        # The sequence number to apply next; None: any, the view is empty.
        self._next: int | None = None
        self._view = 0
        self._last_digest = b""
        self._last_live = -1
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._dropped_to = -1
        # The replay that runs: why, from where, whether there was an answer, whether a check was passed.
        self._purpose: _Purpose | None = None
        self._asked_from = 0
        self._answered = False
        self._confirmed = False

    @property
    def state(self) -> StreamState:
        """How far the view can be trusted now."""
        if not self._up or self._purpose not in (None, _Purpose.TAIL):
            return StreamState.RECOVERING
        return StreamState.STALE if self._lacking else StreamState.EXACT

    @property
    def reason(self) -> str:
        """Why the state is what it is; empty for EXACT."""
        if not self._up:
            return "link_down"
        if self._purpose not in (None, _Purpose.TAIL):
            return str(self._purpose)
        return self._lacking or ""

    @property
    def replay_start(self) -> int | None:
        """From where a replay that broke off must be asked again; None: it is not wanted any more."""
        if self._purpose is None:
            return None
        expected = self._next or 0
        return expected - 1 if self._purpose in _CHECKS and not self._confirmed else expected

    def link_up(self) -> list[Action]:
        """The connection to the publisher was made."""
        self._up = True
        if self._replayable:
            return self._ask(_Purpose.IDENTITY if self._next else _Purpose.HISTORY)
        # Nothing can tell whether it is still the same process.
        return [] if self._next is None else self._restart("link_lost")

    def link_down(self) -> list[Action]:
        """The connection was lost, with all that had not been received; the view stays for now."""
        self._up = False
        self._purpose = None
        self._last_live = -1
        self._drop_waiting()
        self._dropped_to = -1
        return []

    def live(self, sequence: int, payload: bytes) -> list[Action]:
        """The publisher sent a batch."""
        if self._purpose is _Purpose.TAIL:
            self._purpose = None
        actions: list[Action] = [] if self._up else self.link_up()
        if sequence <= self._last_live:
            self._drop_waiting()
            self._dropped_to = -1
            actions = self._restart("sequence_went_back")
        self._last_live = sequence
        self._hold(sequence, payload)
        return actions if self._purpose else actions + self._drain(give_up=not self._replayable)

    def check_tail(self) -> list[Action]:
        """The stream fell quiet: find out whether the last batch applied is the last one published."""
        due = self._up and self._replayable and self._next is not None and self._purpose is None
        return self._ask(_Purpose.TAIL) if due else []

    def replayed(self, sequence: int, payload: bytes) -> list[Action]:
        """The replay socket answered with a batch."""
        if self._purpose is None:
            return []
        expected = self._next or 0
        first, self._answered = not self._answered, True
        if self._purpose in _CHECKS and not self._confirmed:
            self._confirmed = sequence == expected - 1 and xxh3_128_digest(payload) == self._last_digest
            return [] if self._confirmed else self._restart("process_changed")
        if sequence < expected:
            return []
        actions: list[Action] = []
        if sequence > expected:
            if not first:
                # A full queue on the way dropped answers in mid-replay: what is lost can still be asked for.
                return self._ask(_Purpose.GAP)
            actions = self._lose("history_truncated")
        return [*actions, self._applied(sequence, payload)]

    def replay_ended(self) -> list[Action]:
        """The replay socket has told all that it knows."""
        purpose, self._purpose = self._purpose, None
        if purpose is None:
            return []
        if purpose in _CHECKS and not self._confirmed:
            return self._restart("process_changed")
        if self._next is None:
            self._next, self._lacking = 0, None
        fruitless = self._next == self._asked_from
        return self._drain(give_up=purpose is _Purpose.GAP and fruitless)

    def replay_failed(self) -> list[Action]:
        """The replay socket could not be asked, or broke off, as often as the caller was ready to try."""
        purpose, self._purpose = self._purpose, None
        if purpose in (None, _Purpose.TAIL):
            return []
        return self._lose("replay_failed") + self._drain(give_up=True)

    def emptied(self, view: int) -> None:
        """A batch applied to this view told that the engine's cache is empty: the view lacks nothing."""
        if view == self._view:
            self._lacking = None

    def damaged(self, view: int, reason: str) -> None:
        """A batch for this view could not be applied in full."""
        if view == self._view:
            self._lacking = self._lacking or reason

    def _restart(self, reason: str) -> list[Action]:
        """Begins a new life."""
        actions = self._lose("no_history", reason)
        return actions + self._ask(_Purpose.HISTORY) if self._replayable else actions

    def _lose(self, lacking: str, reason: str | None = None) -> list[Action]:
        """Clears the view, which from now on lacks something."""
        self._view += 1
        was_empty = self._next is None
        self._next, self._lacking = None, lacking
        return [] if was_empty else [Clear(reason or lacking)]

    def _ask(self, purpose: _Purpose) -> list[Action]:
        self._purpose = purpose
        self._answered = False
        # Before the first batch there is none to check.
        self._confirmed = not self._next
        self._asked_from = self._next or 0
        start = self.replay_start
        assert start is not None
        return [Replay(start)]

    def _applied(self, sequence: int, payload: bytes) -> Apply:
        if sequence == 0:
            self._lacking = None
        self._next = sequence + 1
        self._last_digest = xxh3_128_digest(payload)
        return Apply(payload, self._view)

    def _hold(self, sequence: int, payload: bytes) -> None:
        self._waiting.append((sequence, payload))
        self._waiting_bytes += len(payload)
        if len(self._waiting) > self._max_batches or self._waiting_bytes > self._max_bytes:
            self._drop_waiting()
            self._dropped_to = sequence

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _drain(self, *, give_up: bool) -> list[Action]:
        """Applies what waits.

        Args:
            give_up: What is missing in front of it cannot be had: do without, rather than ask for it.
        """
        actions: list[Action] = []
        while True:
            sequence, payload = self._waiting[0] if self._waiting else (self._dropped_to + 1, None)
            if self._next is not None and sequence > self._next:
                self.gaps += not (give_up and self._replayable)
                if not give_up:
                    return actions + self._ask(_Purpose.GAP)
                actions += self._lose("gap")
                give_up = not self._replayable
            if payload is None:
                return actions
            self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            if self._next is None or sequence == self._next:
                actions.append(self._applied(sequence, payload))
