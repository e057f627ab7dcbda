"""Views that an outside index lost are built anew, and none is forgotten on the way."""

from __future__ import annotations

from indexer.losses import Losses


def test_what_is_just_being_built_is_told_again() -> None:
    """A loss waits until its view can be doubted, and is then told no more."""
    lost, busy, doubted = [["a", "b"], [], []], {"a"}, []

    def doubt(name: str, now_s: float) -> bool:
        doubted.append((name, now_s))
        return name not in busy

    losses = Losses(lambda: lost.pop(0), doubt)
    losses.tick(10.0)
    assert sorted(doubted) == [("a", 10.0), ("b", 10.0)]
    assert losses.due_s == 11.0
    busy.clear()
    losses.tick(11.0)
    losses.tick(12.0)
    assert sorted(doubted) == [("a", 10.0), ("a", 11.0), ("b", 10.0)]


def test_an_error_costs_a_turn_and_no_loss() -> None:
    """After a failed doubt the losses are still known."""
    lost, doubted = [["a"], []], []

    def fail(name: str, now_s: float) -> bool:
        doubted.append(now_s)
        if len(doubted) == 1:
            raise RuntimeError
        return True

    losses = Losses(lambda: lost.pop(0), fail)
    try:
        losses.tick(1.0)
    except RuntimeError:
        losses.reset(1.0)
    losses.tick(losses.due_s)
    assert doubted == [1.0, 2.0]
