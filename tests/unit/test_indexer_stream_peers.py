"""The sequence state machine: views that a peer told, proved by the engine or dropped."""

from __future__ import annotations

import pytest

from indexer.streams.actions import Fetch
from tests.unit.stream_support import EXACT, RECOVERING, STALE, Loop, followed, payload, told


def late(published: int = 5, **settings: int | bool) -> Loop:
    """A loop that comes late to a life that a peer has followed from its start."""
    loop = Loop(snapshots=True, **settings)
    for _ in range(published):
        loop.publish()
    loop.peer_follows()
    return loop


def test_a_peers_view_goes_on_where_it_ends() -> None:
    """The engine is asked for the last batch in it and all behind it; live batches wait meanwhile."""
    loop = late(history=3)
    loop.publish()
    loop.connect()
    loop.publish()
    loop.answer_fetch()
    assert (loop.replays, loop.view) == ([4], [payload(0, number) for number in range(5)])
    assert told(loop) == (RECOVERING, "identity")
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")
    assert loop.clears == []


def test_a_peers_view_of_another_life_is_dropped() -> None:
    """The last batch in it is not the engine's: nothing of it stays, and the history is asked for."""
    loop = late()
    loop.life = 1
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.clears == ["peer_unproven"] * 4
    assert told(loop) == (EXACT, "")
    assert (loop.fetches, loop.replays) == (4, [4, 4, 4, 4, 0])


def test_a_peers_view_that_the_engine_has_forgotten_is_dropped() -> None:
    """The engine does not have the last batch in it any more: nothing proves it, and something may lack."""
    loop = late(history=2)
    loop.publish()
    loop.publish()
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()[5:]
    assert told(loop) == (STALE, "history_truncated")


def test_a_later_snapshot_of_the_peer_may_be_proved() -> None:
    """Unproved once, the peer is asked again, and by then may be newer."""
    loop = late(history=2)
    loop.publish()
    loop.publish()
    loop.connect()
    loop.answer_fetch()
    loop.answer()
    assert (loop.fetching, loop.view) == (True, [])
    loop.peer_follows()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_a_link_lost_before_the_proof_leaves_the_view_unproved() -> None:
    """After the next connection the proof is asked for first; a new process drops the view."""
    loop = late()
    loop.connect()
    loop.answer_fetch()
    loop.restart()
    assert told(loop) == (RECOVERING, "link_down")
    loop.publish()
    loop.peer = []
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


@pytest.mark.parametrize("overlap", [1, 2])
def test_without_replay_a_batch_in_common_is_the_proof(overlap: int) -> None:
    """If we received the last batch in a peer's view ourselves, it is of the same process."""
    loop = late(replayable=False)
    loop.connect()
    for _ in range(overlap):
        loop.publish()
        loop.deliver()
    loop.peer_follows()
    loop.publish()
    loop.deliver()
    loop.answer_fetch()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_without_replay_and_without_a_batch_in_common_there_is_no_proof() -> None:
    """A peer's view that may be of another process is dropped, and what came live is used."""
    loop = late(replayable=False)
    loop.connect()
    loop.publish()
    loop.deliver()
    loop.settle()
    assert loop.view == [payload(0, 5)]
    assert told(loop)[0] is STALE


def test_without_replay_a_batch_seen_before_is_a_proof_later() -> None:
    """A view that lacks something is healed by a peer's that ends with the last batch that we applied."""
    loop = late(replayable=False)
    loop.connect()
    loop.settle()
    assert told(loop)[0] is STALE
    loop.publish()
    loop.settle()
    loop.peer_follows()
    loop.perform(loop.machine.repair())
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_what_a_peer_says_of_another_life_with_the_same_number_is_no_proof() -> None:
    """The number alone proves nothing: the batch must be the same."""
    loop = late(replayable=False)
    loop.life, loop.published = 1, 4
    loop.connect()
    loop.publish()
    loop.deliver()
    loop.settle()
    assert loop.view == [payload(1, 4)]
    assert told(loop)[0] is STALE


def test_a_doubted_view_is_not_asked_of_peers() -> None:
    """What is wrong with a view made from events is wrong with a peer's, too; after a restart it is not."""
    loop = late()
    loop.connect()
    loop.settle()
    assert Fetch(peers=False) in loop.machine.invalidate("overfull")
    loop.fail_fetch()
    loop.publish()
    loop.settle()
    assert loop.machine.live(0, payload(1, 0))[-1] == Fetch(peers=True)


def test_only_an_exact_view_at_rest_has_a_mark() -> None:
    """What may be told to peers ends with a batch: not before the first, nor while a replay runs."""
    loop = followed(0)
    assert loop.machine.last_batch is None
    loop.publish()
    loop.settle()
    mark = loop.machine.last_batch
    assert mark is not None
    assert (mark[0], len(mark[1])) == (0, 16)
    loop.perform(loop.machine.check_tail())
    assert loop.machine.last_batch is None
    assert loop.machine.cancel_tail_check()
    assert loop.machine.last_batch == mark
    assert not loop.machine.cancel_tail_check()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    assert loop.machine.last_batch is None
    loop.disconnect()
    assert loop.machine.last_batch is None


def test_without_replay_a_gap_behind_the_proved_view_costs_it() -> None:
    """What was missed behind a peer's view cannot be asked for: another snapshot is."""
    loop = late(replayable=False)
    loop.published = 4
    loop.connect()
    loop.publish()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.deliver()
    loop.answer_fetch()
    assert (loop.clears, loop.view, loop.fetches) == (["gap"], [], 2)
    loop.peer_follows()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_each_doubted_life_is_asked_of_peers_as_often() -> None:
    """A batch that is applied ends the count of snapshots that led nowhere."""
    loop = late()
    for life in (1, 2):
        loop.restart()
        for _ in range(5):
            loop.publish()
        loop.connect()
        loop.settle()
        assert loop.view == loop.whole_life()
        assert loop.clears.count("peer_unproven") == 4 * life


def test_a_view_is_healed_while_its_last_batch_is_looked_for() -> None:
    """Whether a STALE view has the last batch is of no interest once a snapshot may make it whole."""
    loop = followed(snapshots=True)
    loop.perform(loop.machine.snapshot_begun())
    loop.machine.damaged(loop.current, "unknown_parent")
    assert told(loop)[0] is STALE
    loop.perform(loop.machine.check_tail())
    assert loop.answers
    loop.perform(loop.machine.repair())
    assert loop.fetching
