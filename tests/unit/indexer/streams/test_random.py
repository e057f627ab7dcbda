"""Sequence state machine under random losses, restarts and replays: never wrong, finally EXACT."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from indexer.index.contract import StreamState
from tests.support.depth import examples
from tests.support.indexer.streams import Loop


class StreamRules(RuleBasedStateMachine):
    """Engine, lossy wire and state machine."""

    @initialize(
        replayable=st.sampled_from([True, True, True, False]),
        snapshots=st.sampled_from(["none", "engine", "peer"]),
        history=st.sampled_from([1000, 1000, 3, 1, 0]),
        max_batches=st.sampled_from([1000, 3, 1]),
    )
    def begin(self, replayable: bool, snapshots: str, history: int, max_batches: int) -> None:
        """Start with a pod that was never connected."""
        self.replayable = replayable
        self.snapshots = snapshots == "engine"
        self.peered = snapshots == "peer"
        self.roomy = history == 1000
        self.failed = False
        self.loop = Loop(
            replayable=replayable, snapshots=snapshots != "none", history=history, max_batches=max_batches
        )
        if self.peered:
            self.loop.peer = []

    @rule(lost=st.booleans(), count=st.integers(1, 6))
    def publish(self, lost: bool, count: int) -> None:
        """Publish a batch."""
        for _ in range(count):
            self.loop.publish(lost=lost)

    @precondition(lambda self: not self.loop.connected)
    @rule()
    def connect(self) -> None:
        """Open the link."""
        self.loop.connect()

    @precondition(lambda self: self.loop.connected)
    @rule(restarted=st.booleans())
    def disconnect(self, restarted: bool) -> None:
        """Close the link, with or without ending the process."""
        if restarted:
            self.loop.restart()
        else:
            self.loop.disconnect()

    @precondition(lambda self: self.loop.wire)
    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        """Deliver live messages."""
        for _ in range(min(count, len(self.loop.wire))):
            self.loop.deliver()

    @precondition(lambda self: self.loop.answers)
    @rule(count=st.integers(1, 3))
    def answer(self, count: int) -> None:
        """Deliver replay answers."""
        for _ in range(count):
            if self.loop.answers:
                self.loop.answer()

    @precondition(lambda self: len(self.loop.answers) > 2)
    @rule(at=st.integers(0, 5))
    def lose_an_answer(self, at: int) -> None:
        """Drop an answer at a full queue: not the first and not the last one."""
        del self.loop.answers[1 + at % (len(self.loop.answers) - 2)]

    @rule()
    def catch_up(self) -> None:
        """Deliver everything under way."""
        self.loop.settle()

    @precondition(lambda self: self.loop.answers)
    @rule()
    def fail(self) -> None:
        """Fail a replay for good."""
        self.failed = True
        self.loop.fail_replay()

    @precondition(lambda self: self.loop.fetching)
    @rule(fails=st.booleans())
    def answer_fetch(self, fails: bool) -> None:
        """Deliver a snapshot, or fail its request."""
        if fails:
            self.failed = True
            self.loop.fail_fetch()
        else:
            self.loop.answer_fetch()

    @rule(doubted=st.booleans())
    def repair(self, doubted: bool) -> None:
        """Repair a STALE view, or report it as wrong."""
        machine = self.loop.machine
        self.loop.perform(machine.invalidate("doubt") if doubted else machine.repair())

    @precondition(lambda self: self.peered)
    @rule(exact=st.booleans())
    def peer_moves(self, exact: bool) -> None:
        """Let the peer catch up with the engine's present process, or lose its view."""
        self.loop.peer_follows()
        if not exact:
            self.loop.peer = []

    @rule()
    def check_tail(self) -> None:
        """Run the check of a quiet stream."""
        if not self.loop.wire and not self.loop.answers:
            self.loop.perform(self.loop.machine.check_tail())

    @invariant()
    def the_view_is_one_run_of_one_process(self) -> None:
        """The batches applied since a clear are contiguous and of one process."""
        if not hasattr(self, "loop"):
            return
        runs = [tuple(map(int, applied.decode().split(":"))) for applied in self.loop.view]
        assert len({life for life, _ in runs}) <= 1
        assert [sequence for _, sequence in runs] == list(
            range(runs[0][1] if runs else 0, (runs[0][1] if runs else 0) + len(runs))
        )

    @invariant()
    def an_exact_view_starts_with_its_process(self) -> None:
        """An EXACT view is of the present process and complete from its start."""
        if not hasattr(self, "loop") or self.loop.machine.state is not StreamState.EXACT:
            return
        assert self.loop.view == self.loop.whole_life()[: len(self.loop.view)]

    def teardown(self) -> None:
        """Check after all deliveries that the view is of the living process and EXACT means complete."""
        if not hasattr(self, "loop"):
            return
        loop = self.loop
        if not loop.connected:
            loop.connect()
        loop.settle()
        loop.perform(loop.machine.check_tail())
        loop.settle()
        assert loop.machine.state is not StreamState.RECOVERING
        assert all(applied in loop.whole_life() for applied in loop.view)
        if loop.machine.state is StreamState.EXACT and self.replayable and loop.history:
            assert loop.view == loop.whole_life()
        if self.snapshots and loop.machine.state is StreamState.STALE:
            loop.perform(loop.machine.repair())
            loop.settle()
            assert loop.machine.state is StreamState.EXACT
            assert loop.view == loop.whole_life()
        if self.roomy and loop.machine.reason == "replay_failed":
            loop.perform(loop.machine.repair())
            loop.settle()
            assert loop.machine.state is StreamState.EXACT
            assert loop.view == loop.whole_life()
        if self.replayable and self.roomy and not self.failed:
            assert loop.machine.state is StreamState.EXACT


TestStream = StreamRules.TestCase
TestStream.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
