"""The HTTP API on the real engine, used by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from openai import NotFoundError

from tests.support.model_server.http import MODEL, RunningServer, running_server, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "Which pod remembers me?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server for all tests of this module."""
    with running_server() as running:
        yield running


def test_completion(server: RunningServer) -> None:
    """A completion has OpenAI's format and usage, and ends by length at max_tokens."""
    answer = server.openai().completions.create(prompt="The KV cache", max_tokens=7, **GREEDY)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(server.tokenizer.encode("The KV cache"))
    assert (usage.completion_tokens, usage.total_tokens) == (7, usage.prompt_tokens + 7)


def test_chat_completion(server: RunningServer) -> None:
    """A chat answer has the role assistant, and its prompt is rendered by the template."""
    answer = server.openai().chat.completions.create(messages=MESSAGES, max_tokens=5, **GREEDY)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(server.chat_ids(MESSAGES))


def test_a_streamed_completion_equals_a_whole_one(server: RunningServer) -> None:
    """Chunks of a greedy stream join to the text of the unstreamed answer."""
    client = server.openai()
    whole = client.completions.create(prompt="stream or not", max_tokens=40, **GREEDY)
    chunks = list(client.completions.create(prompt="stream or not", max_tokens=40, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_chat_opens_with_the_role_and_ends_with_usage(server: RunningServer) -> None:
    """The first chunk has the role; the last chunk has usage and no choices."""
    options: dict[str, Any] = {"messages": MESSAGES, "max_completion_tokens": 9, **GREEDY}
    whole = server.openai().chat.completions.create(**options)
    stream = server.openai().chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 9


def test_a_stream_on_the_wire_ends_with_done(server: RunningServer) -> None:
    """A raw stream consists of `data: {json}` events and ends with `data: [DONE]`."""
    response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(json.loads(event.removeprefix(b"data: "))["choices"] for event in events)


def test_several_prompts_and_copies(server: RunningServer) -> None:
    """Two prompts with n=2 give four choices in prompt order; seeded copies differ reproducibly."""
    options: dict[str, Any] = {
        "prompt": ["first", "second"],
        "n": 2,
        "seed": 1,
        "max_tokens": 12,
        "model": MODEL,
    }
    once, twice = (server.openai().completions.create(**options) for _ in range(2))
    texts = [choice.text for choice in once.choices]
    assert [choice.index for choice in once.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in twice.choices]
    assert texts[0] != texts[1]
    streamed = [""] * 4
    for chunk in server.openai().completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_token_ids_are_a_prompt_too(server: RunningServer) -> None:
    """A prompt as text and as ids gets the same greedy answer."""
    ids = server.tokenizer.encode("ids or text")
    client = server.openai()
    by_text = client.completions.create(prompt="ids or text", max_tokens=8, **GREEDY)
    by_ids = client.completions.create(prompt=ids, max_tokens=8, **GREEDY)
    assert by_text.choices[0].text == by_ids.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"stop": "e"}, {"n": 2, "seed": 1, "temperature": 1.0}, {"logprobs": 1}]
)
def test_returned_ids_are_those_generated(server: RunningServer, stream: bool, extra: dict[str, Any]) -> None:
    """return_token_ids returns as many ids as usage counts; they decode to the text up to its stop."""
    body = {
        "prompt": "The KV cache",
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        "stream": stream,
        **extra,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200
    if stream:
        chunks = [msgspec.json.decode(line[6:]) for line in answer.data.split(b"\n\n")[:-2]]
    else:
        chunks = [answer.json()]
    ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    prompts: dict[int, list[list[int]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["prompt_token_ids"] is not None:
            prompts.setdefault(choice["index"], []).append(choice["prompt_token_ids"])
    assert sum(map(len, ids.values())) == chunks[-1]["usage"]["completion_tokens"]
    assert list(ids) == list(range(body.get("n", 1)))  # type: ignore[call-overload]
    for index, told in ids.items():
        assert prompts[index] == [server.tokenizer.encode("The KV cache")]
        assert server.tokenizer.decode(told).startswith(texts[index])


def test_a_stop_string_is_never_shown(server: RunningServer) -> None:
    """Generation ends before a stop string, streamed or not, even if it spans several tokens."""
    client = server.openai()
    full = client.completions.create(prompt="stop me", max_tokens=40, **GREEDY).choices[0].text
    stop = full[10:18]
    cut = full[: full.index(stop)]
    whole = client.completions.create(prompt="stop me", max_tokens=40, stop=[stop, "never"], **GREEDY)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (cut, "stop")
    assert whole.choices[0].to_dict()["stop_reason"] == stop
    stream = client.completions.create(prompt="stop me", max_tokens=40, stop=stop, stream=True, **GREEDY)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_token_ends_generation_unseen(server: RunningServer) -> None:
    """A stop token id counts as generated and is the stop reason; its text is not shown."""
    client = server.openai()
    text = client.completions.create(prompt="halt", max_tokens=1, **GREEDY).choices[0].text
    stops = [
        token for token in range(server.tokenizer.vocab_size) if server.tokenizer.decode([token]) == text
    ]
    options = {**GREEDY, "extra_body": {"ignore_eos": True, "stop_token_ids": stops}}
    answer = client.completions.create(prompt="halt", max_tokens=20, **options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].to_dict()["stop_reason"] in stops


def test_a_chat_without_max_tokens_may_fill_the_context() -> None:
    """The length of chat answers is limited by the context only."""
    with running_server(max_model_len=64) as small:
        answer = small.openai().chat.completions.create(messages=MESSAGES, **GREEDY)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 64


def test_many_clients_at_once(server: RunningServer) -> None:
    """Concurrent streams each get their own greedy answer."""
    client = server.openai()
    prompts = [f"client number {number}" for number in range(24)]

    def streamed(prompt: str) -> str:
        chunks = client.completions.create(prompt=prompt, max_tokens=20, stream=True, **GREEDY)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(24) as threads:
        together = list(threads.map(streamed, prompts))
    assert together == [streamed(prompt) for prompt in prompts]


def test_request_ids_are_the_clients(server: RunningServer) -> None:
    """x-request-id names the answer, also for concurrent requests; it precedes the body's request_id."""
    bodies = [{"prompt": "id", "max_tokens": 30, "request_id": "of-body"}] * 2
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(
                lambda body: server.post("/v1/completions", body, headers={"X-Request-Id": "abc"}).json(),
                bodies,
            )
        )
    assert [answer["id"] for answer in answers] == ["cmpl-abc", "cmpl-abc"]
    assert server.post("/v1/completions", bodies[0]).json()["id"] == "cmpl-of-body"


def test_models(server: RunningServer) -> None:
    """Every served name is listed with the context length and answers; other names do not."""
    client = server.openai()
    cards = list(client.models.list())
    assert [card.id for card in cards] == [MODEL, "alias"]
    assert cards[0].to_dict()["max_model_len"] == server.engine.max_model_len
    assert client.completions.create(model="alias", prompt="x", max_tokens=1).model == "alias"
    with pytest.raises(NotFoundError, match="'gpt-5' does not exist"):
        client.completions.create(model="gpt-5", prompt="x")


def test_tokenize_and_back(server: RunningServer) -> None:
    """Tokenize returns a request's ids, for text and messages; detokenize inverts it."""
    answer = server.post("/tokenize", {"prompt": "Tokens, please", "return_token_strs": True}).json()
    ids = server.tokenizer.encode("Tokens, please")
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert len(answer["token_strs"]) == len(ids)
    assert answer["max_model_len"] == server.engine.max_model_len
    chat = server.post("/tokenize", {"model": MODEL, "messages": MESSAGES}).json()
    assert chat["tokens"] == server.chat_ids(MESSAGES)
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "Tokens, please"}


def test_operator_endpoints(server: RunningServer) -> None:
    """Health has no body, the version is reported, event sources are the resolved ones."""
    for path in ("/health", "/ping"):
        assert (server.get(path).status, server.get(path).data) == (200, b"")
    assert set(server.get("/version").json()) == {"version"}
    source = server.admin("GET", "/kv_event_sources").json()["0"]
    assert source["endpoint"] == server.publisher.config.endpoint
    assert source["replay_endpoint"] == server.publisher.config.replay_endpoint
    assert (source["publisher"], source["buffer_steps"]) == ("zmq", 10_000)


def test_metrics_count_requests(server: RunningServer) -> None:
    """One request changes vLLM's counters and histograms by its tokens and settings."""
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_inference_time_seconds_count",
    )
    # A request of an earlier test may still be in its last step.
    wait_until(server.idle)
    before = [server.metric(name) for name in names]
    answer = server.openai().completions.create(prompt="count me", max_tokens=6, **GREEDY)
    moved = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert answer.usage is not None
    assert moved == [answer.usage.prompt_tokens, 6, 1, 1, 5, 1, 1, 1]
    page = server.get("/metrics").data.decode()
    assert f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0' in page
    assert 'block_size="16"' in next(line for line in page.splitlines() if "cache_config_info{" in line)
    assert "process_start_time_seconds" in page
