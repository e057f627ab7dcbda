"""The HTTP API's answers to invalid, too large and hostile requests."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import urllib3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import BadRequestError, InternalServerError

from model_server.openai import http_server
from tests.support.depth import examples
from tests.support.model_server.http import (
    MAX_BODY_BYTES,
    MODEL,
    RunningServer,
    running_server,
    wait_until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT_TOKENS = 256
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server with a short context for all tests of this module."""
    with running_server(max_model_len=CONTEXT_TOKENS) as running:
        yield running


def error_of(answer: urllib3.BaseHTTPResponse) -> dict[str, Any]:
    """Return the error of a body, after checking its format."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status
    return body["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, b"", 400, None),
        (COMPLETIONS, b'{"prompt": "x"', 400, None),
        (COMPLETIONS, b'{"prompt": "\xff"}', 400, None),
        (COMPLETIONS, b"[" * 100_000, 400, None),
        (COMPLETIONS, b'["x"]', 400, None),
        (COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', 400, None),
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": 7}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [4096]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 200, "n": 6}, 400, "n"),
        (COMPLETIONS, {"prompt": "x", "model": "gpt-5"}, 404, "model"),
        (COMPLETIONS, {"prompt": "x", "model": 5}, 400, "model"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "8"}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 8.0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": CONTEXT_TOKENS}, 400, "input_tokens"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, 400, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "x", "top_k": -2}, 400, "top_k"),
        (COMPLETIONS, {"prompt": "x", "min_p": 1.5}, 400, "min_p"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**64}, 400, "seed"),
        (COMPLETIONS, {"prompt": "x", "n": 129}, 400, "n"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, 400, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, 400, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5000]}, 400, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, 400, "stream"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 0}, 400, "echo"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"4096": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, 400, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs"),
        (
            COMPLETIONS,
            {"prompt": "x", "response_format": {"type": "json_object"}, "ignore_eos": True},
            400,
            "ignore_eos",
        ),
        (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}, 400, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": 1}, 400, "logprobs"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, None),
        ("/detokenize", {"tokens": [4096]}, 400, "tokens"),
        ("/v2/completions", {}, 404, None),
        ("/v1/models", {}, 405, None),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, bytes | dict) else None,
)
def test_invalid_requests_name_the_field(
    server: RunningServer, path: str, body: Any, status: int, param: str | None
) -> None:
    """Each invalid request has its status and an OpenAI error that names the field."""
    answer = server.post(path, body)
    error = error_of(answer)
    assert (answer.status, error["param"]) == (status, param), error


@pytest.mark.parametrize("prompt", ["word " * 400, "x" * 3_000_000, [1] * CONTEXT_TOKENS])
def test_a_prompt_longer_than_the_context(server: RunningServer, prompt: Any) -> None:
    """The message states the lengths of context and prompt, for text of any size and for ids."""
    with pytest.raises(BadRequestError, match=f"maximum context length is {CONTEXT_TOKENS} tokens") as caught:
        server.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    assert "your prompt contains" in str(caught.value)


def test_a_chat_longer_than_the_context(server: RunningServer) -> None:
    """Messages that exceed the context are rejected like a prompt."""
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "y" * 9_000}]}] * 20
    with pytest.raises(BadRequestError, match="maximum context length"):
        server.openai().chat.completions.create(model=MODEL, messages=messages)


def test_a_body_over_the_cap(server: RunningServer) -> None:
    """A body above the limit is rejected with 413, and the server keeps serving."""
    answer = server.post(COMPLETIONS, b'{"prompt": "' + b"x" * (2 * MAX_BODY_BYTES) + b'"}')
    assert answer.status == 413
    assert str(MAX_BODY_BYTES) in error_of(answer)["message"]
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200


def test_an_endless_body_is_rejected_at_the_limit(server: RunningServer) -> None:
    """An endless chunked body is answered once the limit is reached."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=300)
    sent = 0
    try:
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            while sent < 100 * MAX_BODY_BYTES:
                connection.send(chunk)
                sent += 0x10000
        except OSError:
            pass
        assert sent < 100 * MAX_BODY_BYTES
    finally:
        connection.close()
    assert server.get("/health").status == 200


def test_headers_that_never_end_are_cut_off(server: RunningServer) -> None:
    """A head above the limit gets 400 and a closed connection, with one header or many."""
    host, port = server.url.removeprefix("http://").split(":")
    for piece in (b"x" * 65_536, b"a: b\r\n" * 10_000):
        with socket.create_connection((host, int(port)), timeout=300) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nx-long: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(1_000):
                    connection.sendall(piece)
                pytest.fail("64 MB of headers were taken")
    assert server.get("/health").status == 200


def test_a_head_that_stays_unfinished_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a client that stops within a first or later head is closed."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)
    with running_server() as impatient:
        host, port = impatient.url.removeprefix("http://").split(":")
        for whole in (b"", b"GET /health HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=300) as connection:
                connection.sendall(whole)
                if whole:
                    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
                connection.sendall(b"GET /health HT")
                assert connection.recv(1 << 16) == b""


def test_invalid_http_gets_an_openai_error(server: RunningServer) -> None:
    """Bytes that are not HTTP are answered with 400 in the API's error format."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 400
        assert msgspec.json.decode(answer.read())["error"]["type"] == "BadRequestError"


def test_a_full_queue_is_worth_a_retry() -> None:
    """A request that finds the waiting queue full gets 503, and waiting requests are served."""
    with running_server(max_num_seqs=1, max_waiting=1) as small:
        client = small.openai()
        slow: dict[str, Any] = {"model": MODEL, "max_tokens": 4_000, "extra_body": {"ignore_eos": True}}
        first = client.completions.create(prompt="one", stream=True, **slow)
        next(iter(first))
        prompts: list[str] = ["two", "three"]
        with pytest.raises(InternalServerError) as caught:
            client.completions.create(prompt=prompts, **slow)
        assert caught.value.status_code == 503
        first.close()
        wait_until(small.idle)
        assert client.completions.create(model=MODEL, prompt="four", max_tokens=1).choices


def test_an_error_after_the_first_token_is_an_event() -> None:
    """A stream whose engine stops ends with an error event."""
    with running_server() as dying:
        body = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True, "stream": True}
        answer = dying.post(COMPLETIONS, body, preload_content=False)
        stream = answer.stream()
        assert answer.status == 200
        next(stream)
        dying.engine.close()
        *_, error, done, _ = b"".join(stream).split(b"\n\n")
        assert done == b"data: [DONE]"
        assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["code"] == 503
        assert dying.post(COMPLETIONS, {"prompt": "x"}).status == 503


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "cache_salt",
    "user",
    "request_id",
    "echo",
    "logprobs",
    "tools",
    "tool_choice",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "response_format",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "frequency_penalty",
    "repetition_penalty",
    "top_logprobs",
]
GOOD = st.fixed_dictionaries(
    {"prompt": st.text(max_size=20) | st.lists(st.integers(0, 4095), max_size=5)},
    optional={
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "system", "x"]), "content": st.text(max_size=9)}
            ),
            max_size=3,
        ),
        "temperature": st.floats(0, allow_nan=False, allow_infinity=False),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1),
        "top_k": st.integers(-1, 2**31 - 1),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
        "n": st.integers(1, 3),
        "stream": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "cache_salt": st.text(max_size=3),
        "echo": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(1e-3, 1e3),
        "logit_bias": st.dictionaries(st.integers(0, 4095).map(str), st.floats(-100, 100), max_size=3),
        "allowed_token_ids": st.lists(st.integers(0, 4095), min_size=1, max_size=3),
        "structured_outputs": st.fixed_dictionaries(
            {}, optional={"regex": st.text(max_size=6), "choice": st.lists(st.text(max_size=4), max_size=2)}
        ),
    },
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    good=GOOD,
    broken=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
)
def test_no_body_breaks_the_server(
    server: RunningServer, path: str, good: dict[str, Any], broken: dict[str, Any]
) -> None:
    """Any JSON object is answered with success or an OpenAI 4xx error, never 5xx."""
    answer = server.post(path, {**good, **broken, "max_tokens": 3})
    assert answer.status in (200, 400, 404), answer.data
    if answer.status != 200:
        error_of(answer)
    assert b'"error"' not in answer.data or answer.status != 200


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=200))
def test_no_bytes_break_the_server(server: RunningServer, raw: bytes) -> None:
    """Any bytes are answered with 400, unless they are a valid request."""
    assert server.post(CHAT, raw).status == 400
