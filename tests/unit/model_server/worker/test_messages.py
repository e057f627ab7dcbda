"""Messages between ranks: encoding and errors."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.config import EngineConfig
from model_server.errors import AdapterError, ModelError, ModelServerError
from model_server.shapes.shape import ModelRank
from model_server.worker.workers import (
    MethodCall,
    MethodResult,
    Start,
    decode_call,
    decode_result,
    decode_start,
    encode,
)

NUMBERS = st.integers(0, 2**31 - 1)
ARRAYS = st.lists(NUMBERS, max_size=40).map(lambda numbers: array("i", numbers))
SPANS = st.tuples(NUMBERS, NUMBERS, st.lists(ARRAYS, min_size=1, max_size=3))


@given(tokens=ARRAYS, spans=st.lists(SPANS), lora_ids=st.lists(st.integers(0, 2), max_size=4))
def test_step_is_decoded_unchanged(
    tokens: "array[int]", spans: list[tuple[int, int, list["array[int]"]]], lora_ids: list[int]
) -> None:
    """Tokens, spans with block tables and adapter ids are decoded unchanged; arrays stay arrays."""
    call = decode_call(encode(MethodCall("execute_model", (tokens, array("i"), spans, lora_ids, [7]), False)))
    assert (call.method, call.wants_result) == ("execute_model", False)
    assert call.args == [tokens, array("i"), [list(span) for span in spans], lora_ids, [7]]


def test_settings_are_decoded_with_all_fields() -> None:
    """Other ranks receive the same settings as rank 0."""
    start = Start(EngineConfig(model="x", cpu_gib=0.5, torch_threads=3, seed=9), ModelRank(1, 4), 20)
    assert decode_start(encode(start)) == start


def test_unsupported_argument_raises_on_the_sender() -> None:
    """An argument that is not a number, string or list of them raises on the sender."""
    with pytest.raises(NotImplementedError, match="object cannot be sent"):
        encode(MethodCall("execute_model", [array("i"), [object()]], False))


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
    """Known errors keep their class; other errors name their rank."""
    with pytest.raises(type(wanted)) as caught:
        decode_result(encode(MethodResult.from_error(error))).unwrap(3)
    assert (type(caught.value), str(caught.value)) == (type(wanted), str(wanted))
    assert decode_result(encode(MethodResult("x"))).unwrap(3) == "x"
