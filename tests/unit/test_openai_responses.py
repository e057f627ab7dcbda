"""model_server.openai_responses: what a stream's events say, one by one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.openai_responses import Responder
from model_server.openai_types import Api, generation_body
from model_server.prepare import Job
from model_server.text import Delta
from tokenization import TINY_DIRECTORY, PromptTokenizer

TOKENIZER = PromptTokenizer.from_directory(TINY_DIRECTORY)
NAME = 'm"\\u0000"\0'  # what marks the text's place must not be looked for here


def job(api: Api, **fields: object) -> Job:
    """A request for two choices."""
    return Job(
        api, NAME, NAME, generation_body(api, {"stream": True, "n": 2, **fields}), ((1, 2),), (), ("", "")
    )


def said(events: bytes) -> list[Any]:
    """What these events carry."""
    *pieces, rest = events.split(b"\n\n")
    assert rest == b""
    return [msgspec.json.decode(piece.removeprefix(b"data: ")) for piece in pieces]


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@given(st.lists(st.tuples(st.integers(0, 1), st.text(min_size=1)), max_size=8))
def test_every_event_differs_from_the_first_in_its_text_alone(
    api: Api, options: object, texts: list[tuple[int, str]]
) -> None:
    """Later events, put together from ready parts, have the fields of those that are encoded whole."""
    responder = Responder(job(api, stream_options=options), TOKENIZER)
    first = [responder.events(index, Delta("first", None), None) for index in (0, 1)]
    for index, text in texts:
        event = responder.events(index, Delta(text, None), None)
        whole = first[index][first[index].rindex(b"data: ") :]
        assert event == whole.replace(b'"first"', msgspec.json.encode(text))
        assert [chunk["model"] for chunk in said(event)] == [NAME]


def test_a_chunk_that_says_more_is_encoded_whole() -> None:
    """An end, or counts with every chunk, are told also after plain chunks; what says nothing is left out."""
    responder = Responder(
        job("chat", stream_options={"include_usage": True, "continuous_usage_stats": True}), TOKENIZER
    )
    usage = responder.usage(3, [0, 0])
    responder.events(0, Delta("a", None), usage)
    assert responder.events(0, Delta("", None), usage) == b""
    (counted,) = said(responder.events(0, Delta("b", None), usage))
    assert (counted["usage"], counted["choices"][0]["delta"]) == (usage, {"content": "b"})
    (last,) = said(responder.events(0, Delta("c", "stop", "c"), usage))
    choice = last["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["delta"]) == (
        "stop",
        "c",
        {"content": "c"},
    )
