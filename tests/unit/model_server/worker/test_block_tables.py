"""Block tables by difference: every rank has the tables of the scheduler, whatever happens to requests."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.kv_cache.request import BlockTable, Request, ScheduledRequest
from model_server.worker.block_tables import BlockTableChanges, BlockTables
from tests.support.model_server.engine import request

GROUPS, ROWS, BLOCKS = 2, 3, 12


def admitted(name: str) -> Request:
    """Return a request that has empty tables."""
    made = Request(request(name, [1, 2, 3]), 0)
    made.block_tables = [BlockTable() for _ in range(GROUPS)]
    return made


def grow(tables: list[BlockTable], blocks: list[int]) -> None:
    """Append blocks to all tables of a request."""
    for group, table in enumerate(tables):
        table.block_ids.extend(block + 100 * group for block in blocks)


def item(made: Request, length: int = 1) -> ScheduledRequest:
    """Return the request's part of a step."""
    return ScheduledRequest(made, 5, length, True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "preempt", "end", "lose"]), st.integers(0, ROWS - 1), st.integers(0, 3)
        ),
        max_size=60,
    )
)
def test_ranks_follow_the_scheduler(events: list[tuple[str, int, int]]) -> None:
    """After growth, preemptions, ends, reused names and lost messages a span has its request's tables."""
    changes, tables = BlockTableChanges(ROWS), BlockTables(GROUPS, ROWS, BLOCKS)
    running = [admitted(f"r{number}") for number in range(ROWS)]
    next_block = 1
    for kind, number, count in events:
        made = running[number]
        if kind == "preempt":
            made.block_tables = [BlockTable() for _ in range(GROUPS)]
        elif kind == "end":
            made.block_tables = []
            running[number] = made = admitted(f"r{number}" if count else f"new{next_block}")
        elif kind == "lose":
            if made.block_ids[0]:
                changes.take(item(made))
            changes.clear()
        room = BLOCKS - len(made.block_ids[0])
        added = min(room, max(count, int(not made.block_ids[0])))
        grow(made.block_tables, list(range(next_block, next_block + added)))
        next_block += added
        # As another rank receives it.
        numbers = changes.take(item(made, 2))
        span = tables.apply(numbers)
        assert (span.start, span.length) == (5, 2)
        assert np.array_equal(span.block_tables, made.block_ids)


def test_only_new_blocks_are_sent() -> None:
    """A table of a thousand blocks that gains one sends that one."""
    changes, made = BlockTableChanges(1), admitted("r")
    grow(made.block_tables, list(range(1000)))
    assert len(changes.take(item(made))[4][0]) == 1000
    assert changes.take(item(made))[3:] == (1000, [array("i")] * GROUPS)
    grow(made.block_tables, [7])
    assert changes.take(item(made))[3:] == (1000, [array("i", [7]), array("i", [107])])


def test_more_requests_than_rows_are_an_error() -> None:
    """Rows of running requests are never given to others."""
    changes = BlockTableChanges(1)
    first = admitted("first")
    grow(first.block_tables, [1])
    changes.take(item(first))
    second = admitted("second")
    with pytest.raises(IndexError):
        changes.take(item(second))
    first.block_tables = []
    assert changes.take(item(second))[0] == 0
