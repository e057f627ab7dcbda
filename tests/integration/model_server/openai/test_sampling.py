"""Sampling options of requests: log probabilities, penalties, biases, structured outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.model_server.http import MODEL, RunningServer, running_server

MESSAGES: list[Any] = [{"role": "user", "content": "Which pod remembers me?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"pod": {"enum": ["a", "b"]}, "warm": {"type": "boolean"}},
    "required": ["pod", "warm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server for all tests of this module."""
    with running_server() as running:
        yield running


def choice(server: RunningServer, **body: Any) -> dict[str, Any]:
    """Return the only choice of a completion."""
    answer = server.post("/v1/completions", {**GREEDY, "prompt": "ask", "max_tokens": 12, **body})
    assert answer.status == 200, answer.data
    (only,) = answer.json()["choices"]
    return only


def token_ids(server: RunningServer, text: str) -> list[int]:
    """Return all ids that decode to this text."""
    return [id_ for id_ in range(server.tokenizer.vocab_size) if server.tokenizer.decode([id_]) == text]


def test_a_completion_tells_log_probabilities(server: RunningServer) -> None:
    """Greedy tokens have the best log probability, and offsets are their positions in the text."""
    said = choice(server, logprobs=3)
    told = said["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == 12
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) < 0
    assert told["text_offset"][0] == 0
    assert told["text_offset"][-1] == len("".join(told["tokens"][:-1]))


def test_a_chat_tells_log_probabilities_as_openai_does(server: RunningServer) -> None:
    """Every token has its bytes and the requested number of alternatives, streamed or not."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    client = server.openai()
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert [len(entry.top_logprobs) for entry in whole.content] == [2] * 8
    assert all(bytes(entry.bytes).decode() == entry.token for entry in whole.content if entry.bytes)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole.content])


def test_log_probabilities_are_a_distribution(server: RunningServer) -> None:
    """Log probabilities are the model's own: temperature and bias do not change them."""
    plain = choice(server, max_tokens=1, logprobs=20)["logprobs"]["top_logprobs"][0]
    bent = choice(server, max_tokens=1, logprobs=20, temperature=2.0, top_k=1)["logprobs"]["top_logprobs"][0]
    assert bent == pytest.approx(plain)
    assert sum(map(math.exp, plain.values())) < 1


def test_a_bias_decides(server: RunningServer) -> None:
    """A token biased by 100 is chosen; one biased by -100 is not."""
    first = choice(server, max_tokens=1)["text"]
    ids = token_ids(server, first)
    assert choice(server, max_tokens=1, logit_bias={str(id_): -100 for id_ in ids})["text"] != first
    assert choice(server, max_tokens=3, logit_bias={"300": 100})["text"] == server.tokenizer.decode([300] * 3)


def test_only_allowed_tokens_come(server: RunningServer) -> None:
    """With allowed_token_ids no other token is chosen."""
    said = choice(server, allowed_token_ids=[300, 301], temperature=1.0, max_tokens=30, logprobs=0)
    allowed = {server.tokenizer.decode([300]), server.tokenizer.decode([301])}
    assert set(said["logprobs"]["tokens"]) == allowed


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_a_penalty_ends_a_repetition(server: RunningServer, penalty: dict[str, float]) -> None:
    """A token that a bias repeats is replaced once a presence penalty applies."""
    first = choice(server, max_tokens=1, logprobs=20)["logprobs"]["top_logprobs"][0]
    best, second = sorted(first.values(), reverse=True)[:2]
    (favourite,) = [text for text, logprob in first.items() if logprob == best]
    bias = {str(id_): 30.0 for id_ in token_ids(server, favourite)}
    free = choice(server, max_tokens=40, logprobs=0, logit_bias=bias)["logprobs"]["tokens"]
    held = choice(server, max_tokens=40, logprobs=0, logit_bias=bias, **penalty)["logprobs"]["tokens"]
    assert best >= second
    assert free.count(favourite) == 40
    if "frequency_penalty" in penalty:
        assert held.count(favourite) < 40
    else:
        assert held[0] == favourite


def test_a_repetition_penalty_counts_the_prompt(server: RunningServer) -> None:
    """With a huge repetition penalty no token of the prompt or the answer is repeated."""
    ids = server.tokenizer.encode("the cache and the pod")
    tokens = choice(server, prompt=ids, max_tokens=40, repetition_penalty=1e6, logprobs=0)["logprobs"][
        "tokens"
    ]
    assert len(set(tokens)) == 40
    assert not set(tokens) & {server.tokenizer.decode([id_]) for id_ in ids}


def test_echo_puts_the_prompt_first(server: RunningServer) -> None:
    """Echo returns prompt and answer, whole and streamed, for each choice."""
    body = {"prompt": ["one two", "three"], "n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 5}
    plain = server.post("/v1/completions", body).json()["choices"]
    echoed = server.post("/v1/completions", {**body, "echo": True}).json()["choices"]
    prompts = ["one two", "one two", "three", "three"]
    assert [said["text"] for said in echoed] == [
        prompt + said["text"] for prompt, said in zip(prompts, plain, strict=True)
    ]
    texts = [""] * 4
    stream = server.openai().completions.create(model=MODEL, stream=True, echo=True, **body)  # type: ignore[call-overload]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [said["text"] for said in echoed]


def test_a_stop_string_is_shown_on_demand(server: RunningServer) -> None:
    """With include_stop_str_in_output the text includes the stop string."""
    full = choice(server, max_tokens=40)["text"]
    stop = full[10:18]
    said = choice(server, max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert (said["text"], said["stop_reason"]) == (full[: full.index(stop) + len(stop)], stop)


def test_usage_can_come_with_every_chunk(server: RunningServer) -> None:
    """continuous_usage_stats counts tokens chunk by chunk."""
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "ignore_eos": True, "temperature": 0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw = server.post("/v1/completions", {**body, "stream_options": options}).data
    events = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n")[:-2]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "pod", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": msgspec.json.encode(SCHEMA).decode()}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_follows_its_schema(server: RunningServer, path: str, wish: dict[str, Any]) -> None:
    """A schema binds random weights at any temperature and in every copy, and the answer ends by itself."""
    body = {"prompt": "x", "messages": MESSAGES, "n": 3, "seed": 4, "temperature": 1.5, "max_tokens": 400}
    answer = server.post(path, {**body, **wish}).json()
    for said in answer["choices"]:
        value = msgspec.json.decode(said["text"] if "text" in said else said["message"]["content"])
        assert set(value) == {"pod", "warm"}
        assert value["pod"] in ("a", "b")
        assert isinstance(value["warm"], bool)
        assert said["finish_reason"] == "stop"


def test_an_answer_follows_a_pattern_or_is_one_of_the_choices(server: RunningServer) -> None:
    """A regex or a list of choices binds the answer, streamed or not."""
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 50, "temperature": 2.0, "ignore_eos": False}
    pattern = choice(server, **body, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"})["text"]
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", pattern)
    choices = ["yes", 'no, "never"', "vielleicht ü"]
    extra = {"structured_outputs": {"choice": choices}}
    stream = server.openai().completions.create(
        model=MODEL, prompt="x", max_tokens=50, stream=True, extra_body=extra
    )
    assert "".join(chunk.choices[0].text for chunk in stream) in choices


def test_a_json_object_is_one(server: RunningServer) -> None:
    """JSON mode gives an object, or the beginning of one."""
    said = choice(server, response_format={"type": "json_object"}, ignore_eos=False, max_tokens=30)
    assert said["text"].startswith("{")
    if said["finish_reason"] == "stop":
        assert isinstance(msgspec.json.decode(said["text"]), dict)


def test_a_pattern_that_proves_too_complex_is_an_error(server: RunningServer) -> None:
    """An answer whose grammar failed is an error."""
    body = {"prompt": "x", "max_tokens": 50, "structured_outputs": {"regex": "a{100000000}"}}
    answer = server.post("/v1/completions", body)
    assert answer.status in (400, 500)
    assert (
        "structured_outputs" in answer.json()["error"]["message"]
        or "structured output" in answer.json()["error"]["message"]
    )
