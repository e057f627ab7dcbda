"""model_server.openai.answers: contents of single stream events."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.openai.answers import Answer
from model_server.openai.generation import Delta, TextAssembler
from model_server.openai.prompts import Job
from model_server.openai.types import Api, generation_body
from tokenization import TINY_DIRECTORY, PromptTokenizer

TOKENIZER = PromptTokenizer.from_directory(TINY_DIRECTORY)
NAME = 'm"\\u0000"\0'  # contains the mark that separates text in events


def job(api: Api, **fields: object) -> Job:
    """Return a request for two choices."""
    return Job(
        api, NAME, NAME, generation_body(api, {"stream": True, "n": 2, **fields}), ((1, 2),), (), ("", "")
    )


class Counted:
    """Generation with the texts of two choices."""

    texts = (TextAssembler(TOKENIZER), TextAssembler(TOKENIZER))


def answer(asked: Job) -> Answer:
    """Return the answer to a request whose deltas the test provides."""
    return Answer(asked, TOKENIZER, Counted())  # type: ignore[arg-type]


def said(events: bytes) -> list[Any]:
    """Return the decoded events."""
    *pieces, rest = events.split(b"\n\n")
    assert rest == b""
    return [msgspec.json.decode(piece.removeprefix(b"data: ")) for piece in pieces]


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@given(st.lists(st.tuples(st.integers(0, 1), st.text(min_size=1)), max_size=8))
def test_every_event_differs_from_the_first_in_its_text_alone(
    api: Api, options: object, texts: list[tuple[int, str]]
) -> None:
    """Text-only events, built from cached parts, have all fields of other events."""
    shaped = answer(job(api, stream_options=options))
    first = [shaped.events(index, Delta("first", None), None) for index in (0, 1)]
    for index, text in texts:
        event = shaped.events(index, Delta(text, None), None)
        whole = first[index][first[index].rindex(b"data: ") :]
        assert event == whole.replace(b'"first"', msgspec.json.encode(text))
        assert [chunk["model"] for chunk in said(event)] == [NAME]


def test_a_chunk_with_details_is_encoded_whole() -> None:
    """Ends and continuous usage are sent after text-only events; empty deltas are not."""
    shaped = answer(job("chat", stream_options={"include_usage": True, "continuous_usage_stats": True}))
    usage = shaped.usage()
    shaped.events(0, Delta("a", None), usage)
    assert shaped.events(0, Delta("", None), usage) == b""
    (counted,) = said(shaped.events(0, Delta("b", None), usage))
    assert (counted["usage"], counted["choices"][0]["delta"]) == (usage, {"content": "b"})
    (last,) = said(shaped.events(0, Delta("c", "stop", "c"), usage))
    choice = last["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["delta"]) == (
        "stop",
        "c",
        {"content": "c"},
    )


def test_a_streamed_completion_tells_prompt_ids_once_and_each_deltas_ids() -> None:
    """A choice's first chunk has the prompt ids, each chunk its token ids, also without text."""
    asked = Job(
        "completion",
        NAME,
        NAME,
        generation_body("completion", {"stream": True, "n": 2, "return_token_ids": True}),
        ((1, 2), (3,)),
        (),
        ("",) * 4,
    )
    shaped = answer(asked)
    first, silent, last = (
        said(shaped.events(2, delta, None))[0]["choices"][0]
        for delta in (
            Delta("a", None, token_ids=(7,)),
            Delta("", None, token_ids=(8, 9)),
            Delta("b", "stop", token_ids=(2,)),
        )
    )
    assert (first["prompt_token_ids"], first["token_ids"]) == ([3], [7])
    assert (silent["prompt_token_ids"], silent["token_ids"], silent["text"]) == (None, [8, 9], "")
    assert (last["prompt_token_ids"], last["token_ids"]) == (None, [2])


def test_a_streamed_chat_tells_prompt_ids_with_the_role() -> None:
    """The role's chunk has the prompt ids beside its choices; later chunks have token ids only."""
    shaped = answer(job("chat", return_token_ids=True))
    opening, first = said(shaped.events(1, Delta("a", None, token_ids=(7,)), None))
    assert opening["prompt_token_ids"] == [1, 2]
    assert "token_ids" not in opening["choices"][0]
    assert "prompt_token_ids" not in first
    assert first["choices"][0]["token_ids"] == [7]
    (empty,) = said(shaped.events(1, Delta("", None, token_ids=(8,)), None))
    assert (empty["choices"][0]["delta"], empty["choices"][0]["token_ids"]) == ({}, [8])


def test_a_whole_answer_tells_ids_where_vllm_does() -> None:
    """A completion's choices have both lists; a chat has prompt ids outside its choices."""
    answers = [Delta("a", "stop", token_ids=(7, 8)), Delta("b", "length", token_ids=(9,))]
    completion = answer(job("completion", return_token_ids=True)).body(answers)
    assert [choice["token_ids"] for choice in completion["choices"]] == [(7, 8), (9,)]
    assert [choice["prompt_token_ids"] for choice in completion["choices"]] == [(1, 2), (1, 2)]
    chat = answer(job("chat", return_token_ids=True)).body(answers)
    assert chat["prompt_token_ids"] == (1, 2)
    assert [choice["token_ids"] for choice in chat["choices"]] == [(7, 8), (9,)]
    assert "prompt_token_ids" not in chat["choices"][0]


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_ids_that_nobody_asked_for_are_null(api: Api) -> None:
    """The keys are present without values, as in vLLM."""
    whole = answer(job(api)).body([Delta("a", "stop")] * 2)
    holder = whole if api == "chat" else whole["choices"][0]
    assert (holder["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (None, None)
    *_, chunk = said(answer(job(api)).events(0, Delta("a", None), None))
    assert chunk["choices"][0]["token_ids"] is None
