"""Export of a view for a peer, turn by turn, while live batches wait within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from indexer.errors import PeerError
from indexer.index.layout import HeldBlocks
from indexer.streams.actions import Batch
from indexer.streams.view_export import ViewExports
from indexer.views.view_parts import ViewFacts, ViewPart, ViewSnapshot

FACTS = ViewFacts(None, False, False, ())
MARK = (7, b"d" * 16)
PART = ViewPart(None, HeldBlocks(*[np.ones(100, np.uint64)] * 5))


def begun(
    parts: Iterator[ViewPart | None], max_bytes: int = 1 << 20
) -> tuple[ViewExports, Future[ViewSnapshot]]:
    """Start an export at time 0; return it and the future of its snapshot."""
    exports, told = ViewExports(max_bytes), Future[ViewSnapshot]()
    exports.begin(told, ViewSnapshot(*MARK, FACTS, 3), parts, 0.0)
    return exports, told


def refusal(told: Future[ViewSnapshot]) -> str:
    """Return the reason of a failed export."""
    error = told.exception(0)
    assert isinstance(error, PeerError)
    return error.reason


def test_an_export_adds_one_part_a_turn() -> None:
    """Each turn adds one part or none; the snapshot has all parts, the last batch and the facts."""
    exports, told = begun(iter([PART, None, PART]))
    turns = 0
    while exports.running:
        assert not told.done()
        exports.turn(exports.due_s)
        turns += 1
    assert turns == 4
    snapshot = told.result(0)
    assert (snapshot.sequence, snapshot.digest) == MARK
    assert (snapshot.facts, snapshot.evicted_blocks, len(snapshot.parts)) == (FACTS, 3, 2)


def test_turns_leave_time_to_others() -> None:
    """A turn before it is due does nothing."""
    exports, _ = begun(iter([PART] * 3))
    exports.turn(0.0)
    due_s = exports.due_s
    assert due_s > 0.0
    exports.turn(0.0)
    assert exports.due_s == due_s


def test_live_batches_wait_in_order() -> None:
    """Live batches wait until the export ends, and as long as earlier ones wait."""
    exports, _ = begun(iter([]))
    batches = [Batch(number, b"x") for number in range(5)]
    assert exports.hold(batches[:3])
    exports.turn(0.0)
    assert (exports.running, exports.holds) == (False, True)
    assert exports.hold(batches[3:])
    assert exports.take(2) == batches[:2]
    assert exports.holds
    assert exports.take() == batches[2:]
    assert not exports.holds


@pytest.mark.parametrize(
    "flood",
    [[Batch(number, b"") for number in range(3000)], [Batch(number, bytes(1 << 20)) for number in range(9)]],
)
def test_too_many_waiting_batches_abort_the_export(flood: list[Batch]) -> None:
    """Above the bounds of batches or bytes the export is aborted, and no batch is lost."""
    exports, told = begun(iter([PART] * 3))
    held = [exports.hold([batch]) for batch in flood]
    assert not all(held)
    assert refusal(told) == "busy"
    assert not exports.running
    assert exports.take() == flood


def test_a_view_that_is_too_large_is_not_exported() -> None:
    """The size of the parts is checked during the export."""
    exports, told = begun(iter([PART] * 3), max_bytes=3000)
    for _ in range(2):
        exports.turn(exports.due_s)
    assert refusal(told) == "too_large"
    assert not exports.running


def test_a_second_export_is_rejected_while_one_runs() -> None:
    """A second export is rejected as busy."""
    exports, _ = begun(iter([PART]))
    with pytest.raises(PeerError, match="busy"):
        exports.begin(Future(), ViewSnapshot(*MARK, FACTS, 0), iter([]), 0.0)


def test_a_cancelled_export_ends_with_the_next_turn() -> None:
    """An export whose future was cancelled ends with the next turn."""
    exports, told = begun(iter([PART] * 3))
    assert told.cancel()
    exports.turn(0.0)
    assert not exports.running


def test_an_error_during_an_export_aborts_it(caplog: pytest.LogCaptureFixture) -> None:
    """An error during an export is reported to the peer and does not affect the stream."""

    def failing() -> Iterator[ViewPart | None]:
        yield PART
        raise ValueError("an error of ours")

    exports, told = begun(failing())
    exports.turn(0.0)
    exports.turn(exports.due_s)
    assert refusal(told) == "internal_error"
    assert "an error of ours" in caplog.text
    assert not exports.holds
