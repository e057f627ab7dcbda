"""model_server.openai.prompts: request bodies become engine requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from model_server.model.lora import LoraRegistry
from model_server.openai.prompts import (
    Job,
    ServedModel,
    detokenize,
    prepare,
    render,
    tokenize,
)
from model_server.openai.types import Api, ApiError
from model_server.requests import LoraRequest
from tokenization import TINY_DIRECTORY, PromptTokenizer

CONTEXT_TOKENS = 100
# The tokenizer has 4096 ids; embeddings of checkpoints may be padded.
PADDED_VOCABULARY = 4160
MESSAGES = [{"role": "user", "content": "x"}]


@cache
def model() -> ServedModel:
    """Return the tiny model with a short context."""
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    adapters = LoraRegistry(lambda directory, name, lora_id: LoraRequest(name, lora_id, "", directory), 0)
    return ServedModel(("tiny", "alias"), "somewhere", tokenizer, CONTEXT_TOKENS, PADDED_VOCABULARY, adapters)


def job(api: Api = "completion", header_id: str | None = None, **body: Any) -> Job:
    """Prepare a body given as keywords."""
    return prepare(model(), api, msgspec.json.encode(body), header_id)


@pytest.mark.parametrize(
    ("api", "body", "expected"),
    [
        ("completion", {}, 16),
        ("completion", {"max_tokens": 30}, 30),
        ("completion", {"prompt": [1] * 90}, 10),
        ("completion", {"max_completion_tokens": 30}, 16),
        ("completion", {"prompt": [1] * 200, "truncate_prompt_tokens": 80, "max_tokens": 30}, 20),
        ("completion", {"prompt": [1] * 200, "truncate_prompt_tokens": -1, "max_tokens": 30}, 1),
        ("chat", {"max_tokens": 30}, 30),
        ("chat", {"max_tokens": 30, "max_completion_tokens": 20}, 20),
    ],
)
def test_how_long_an_answer_may_be(api: Api, body: dict[str, Any], expected: int) -> None:
    """Completions default to 16 tokens or the remaining context; max_completion_tokens is for chats."""
    prompts = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert job(api, **{**prompts, **body}).requests[0].sampling.max_tokens == expected


def test_a_chat_may_fill_the_context() -> None:
    """Without a limit a chat's answer ends with the context."""
    prepared = job("chat", messages=MESSAGES)
    assert prepared.requests[0].sampling.max_tokens == CONTEXT_TOKENS - sum(map(len, prepared.prompts))


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"prompt": [1] * 100}, "100 input tokens"),
        ({"prompt": [1] * 60, "max_tokens": 41}, "60 input tokens and 41 tokens of output"),
        ({"prompt": "x" * 1_000_000}, r"at least \d+ input tokens"),
        ({"prompt": ["fine", "x" * 1_000_000]}, r"at least \d+ input tokens"),
        (
            {"api": "chat", "messages": MESSAGES, "tools": [{"function": {"name": "x" * 1_000_000}}]},
            r"at least \d+ input",
        ),
    ],
)
def test_too_long_for_the_context(body: dict[str, Any], numbers: str) -> None:
    """A prompt and answer above the context are rejected with the numbers."""
    with pytest.raises(ApiError, match=f"maximum context length is 100 tokens.* {numbers}") as caught:
        job(**body)
    assert caught.value.status == 400


def test_tokenize_rejects_a_far_too_long_text_without_encoding() -> None:
    """A text that cannot fit into the context is rejected by its length, without encoding."""
    with pytest.raises(ApiError, match="maximum context length is 100 tokens"):
        tokenize(model(), msgspec.json.encode({"prompt": "x" * 1_000_000}))


@pytest.mark.parametrize("depth", [600, 900])
@pytest.mark.parametrize(("api", "field"), [("completion", "prompt"), ("chat", "messages")])
def test_a_deeply_nested_prompt_is_a_wrong_prompt(api: Api, field: str, depth: int) -> None:
    """Deep nesting is a 400 like any other wrong type."""
    raw = b'{"%b": [1, %b]}' % (field.encode(), b"[" * depth + b"]" * depth)
    with pytest.raises(ApiError) as caught:
        prepare(model(), api, raw, None)
    assert caught.value.status == 400


def test_sampling_defaults() -> None:
    """Omitted fields have neutral values."""
    sampling = job(prompt="x").requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos) == (None, frozenset(), False)


def test_sampling_fields_reach_the_engine() -> None:
    """Fields of the body reach the engine; a top_k of -1 means all."""
    body = {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -3, "ignore_eos": True}
    request = job(prompt="x", stop_token_ids=[5, 6], min_tokens=2, cache_salt="s", **body).requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.seed, sampling.stop_token_ids, sampling.min_tokens) == (-3, frozenset({5, 6}), 2)
    assert (sampling.ignore_eos, request.cache_salt) == (True, "s")


def test_choices_are_ordered_by_prompt_then_copy() -> None:
    """Copies of the first prompt come first; copies have their own seeds, and ids differ."""
    prepared = job(prompt=[[1], [2, 3]], n=2, seed=8)
    assert [request.prompt_token_ids for request in prepared.requests] == [(1,), (1,), (2, 3), (2, 3)]
    assert [request.sampling.seed for request in prepared.requests] == [8, 9, 8, 9]
    assert len({request.request_id for request in prepared.requests}) == 4
    assert sum(map(len, prepared.prompts)) == 3


def test_extreme_seeds_stay_in_range() -> None:
    """A copy's seed fits 64 bits for the largest and smallest seed."""
    for seed in (2**63 - 1, -(2**63)):
        seeds = [request.sampling.seed for request in job(prompt="x", n=3, seed=seed).requests]
        assert len(set(seeds)) == 3
        assert all(copy is not None and -(2**63) <= copy < 2**63 for copy in seeds)


def test_one_client_id_twice_gives_two_engine_ids() -> None:
    """The shown id is the client's, header before body; engine ids are unique."""
    first, second = (job(prompt="x", request_id="body", header_id="header") for _ in range(2))
    assert first.request_id == second.request_id == "cmpl-header"
    assert first.requests[0].request_id != second.requests[0].request_id
    assert job(prompt="x", request_id="body").request_id == "cmpl-body"


def test_an_error_quotes_little_of_a_large_request() -> None:
    """A message that quotes a long value is truncated."""
    with pytest.raises(ApiError) as caught:
        job(model="\0" * 100_000)
    assert len(caught.value.body()) < 10_000


def test_models_are_known_by_all_their_names() -> None:
    """The answer's model is the requested name, or the first."""
    assert [job(prompt="x", **named).model for named in ({}, {"model": "alias"})] == ["tiny", "alias"]


def test_ids_up_to_the_padded_vocabulary_are_accepted() -> None:
    """Ids between the tokenizer's vocabulary and the padded one are accepted, as in vLLM."""
    last = PADDED_VOCABULARY - 1
    body = {"prompt": [last, 5], "stop_token_ids": [last], "logit_bias": {str(last): 1.0}}
    assert job(**body, allowed_token_ids=[last]).prompts == ((last, 5),)
    raw = msgspec.json.encode({"prompt": [[last], [1]]})
    assert [each["token_ids"] for each in render(model(), "completion", raw)] == [[last], [1]]  # type: ignore[attr-defined]
    assert detokenize(model(), msgspec.json.encode({"tokens": [last]})) == {"prompt": ""}
    with pytest.raises(ApiError, match=f"from 0 to {last}"):
        job(prompt=[PADDED_VOCABULARY])
    with pytest.raises(ApiError, match=f"less than {PADDED_VOCABULARY}"):
        detokenize(model(), msgspec.json.encode({"tokens": [PADDED_VOCABULARY]}))


def test_a_prompt_with_returned_ids_is_not_echoed() -> None:
    """With return_token_ids echo omits the prompt's text, as in vLLM."""
    assert job(prompt="x", echo=True).echoed == ("x",)
    assert job(prompt="x", echo=True, return_token_ids=True).echoed == ("",)
