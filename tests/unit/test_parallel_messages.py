"""What the ranks say to each other arrives as it was meant."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.attention import Span
from model_server.config import EngineConfig
from model_server.errors import AdapterError, ModelError, ModelServerError
from model_server.lora import LoraAdapter
from model_server.parallel.messages import (
    Done,
    Failed,
    Restore,
    Run,
    Start,
    encode,
    pack,
    read_answer,
    read_order,
    unpack,
)
from model_server.shapes import Division
from model_server.step import Step

NUMBERS = st.integers(0, 2**31 - 1)
ADAPTERS = {number: LoraAdapter(f"a{number}", number, "", {}) for number in (1, 2)}
SPANS = st.tuples(
    NUMBERS, NUMBERS, st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=3), st.integers(0, 2)
)


@given(tokens=st.lists(NUMBERS, max_size=40), rows=st.lists(NUMBERS, max_size=5), spans=st.lists(SPANS))
def test_a_step_arrives_as_it_was_told(
    tokens: list[int], rows: list[int], spans: list[tuple[int, int, list[list[int]], int]]
) -> None:
    """Tokens, rows, spans with all their block tables, and each span's adapter, by its number."""
    step = Step(
        tokens,
        rows,
        [Span(start, length, [array("i", table) for table in tables]) for start, length, tables, _ in spans],
        [ADAPTERS.get(number) for *_, number in spans],
    )
    order = read_order(encode(Run.of(step, [7])))
    assert isinstance(order, Run)
    assert order.dropped == [7]
    got = order.step(ADAPTERS)
    assert (list(got.token_ids), list(got.rows), got.adapters) == (tokens, rows, step.adapters)
    assert got.spans == [Span(span.start, span.length, list(span.block_tables)) for span in step.spans]


def test_settings_arrive_with_all_their_fields() -> None:
    """The other ranks have the very settings that rank 0 has."""
    start = Start(EngineConfig(model="x", cpu_gib=0.5, torch_threads=3, seed=9), Division(1, 4), 20)
    assert read_order(encode(start)) == start


def test_numbers_too_large_are_not_cut() -> None:
    """What has no room in 31 bits raises where it is sent."""
    assert unpack(pack(range(3))).tolist() == [0, 1, 2]
    restore = Restore(2**40, pack([1]), pack([2]))
    assert read_order(encode(restore)) == restore
    with pytest.raises(OverflowError):
        pack([2**31])


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ModelError("no such file"), ModelError("no such file")),
        (AdapterError("too large"), AdapterError("too large")),
        (KeyError("q"), ModelServerError("rank 3: 'q'")),
        (RuntimeError(), ModelServerError("rank 3: RuntimeError")),
    ],
)
def test_an_error_of_another_rank_is_raised_here(error: Exception, wanted: ModelServerError) -> None:
    """The server's own errors come out as they are, others say which rank they are from."""
    answer = read_answer(encode(Failed.of(error)))
    assert isinstance(answer, Failed)
    got = answer.error(3)
    assert (type(got), str(got)) == (type(wanted), str(wanted))
    assert read_answer(encode(Done("x"))) == Done("x")
