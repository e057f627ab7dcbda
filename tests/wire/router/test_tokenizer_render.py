"""Tokenizer over a server's render endpoints, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from router.prompts.remote_tokenizers import RenderTokenizer
from router.prompts.request import RequestKind, RouteRequest
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.router.bench import completion, ready_pod
from tests.support.router.render import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Renderer, running_renderer
from tests.support.tokenization.media import CASES, answer

MODEL = "m"


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    """Yield a running renderer."""
    with running_renderer() as running:
        yield running


@pytest.fixture
def registry(renderer: Renderer) -> Iterator[TokenizerRegistry]:
    """Yield a registry with one tokenizer at a URL and one at the pods."""
    sources = {MODEL: f"http://{renderer.address}", "pods": "pods", "none": "http://127.0.0.1:1"}
    made = TokenizerRegistry(open_tokenizers(sources), TokenizeOptions(deadline_s=30))
    yield made
    made.close()


def chat(text: str = "hello") -> RouteRequest:
    """Return a chat request."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    return RouteRequest("id", RequestKind.CHAT, MODEL, body, body_bytes=400)


def rendered(ids: list[int], **fields: object) -> dict[str, object]:
    """Return a rendered prompt with fields that are not read."""
    return {"request_id": "x", "token_ids": ids, "sampling_params": {"n": 1}, **fields}


def test_ids_come_from_the_server(renderer: Renderer, registry: TokenizerRegistry) -> None:
    """A chat's prompt and a completion's several prompts have the token ids of the server's response."""
    renderer.answers = {
        CHAT: (200, json.dumps(rendered([1, 2, 3])).encode()),
        COMPLETIONS: (200, json.dumps([rendered([4]), rendered([5, 6], features=None)]).encode()),
    }
    tokens = registry.prompt_tokens(chat(), MODEL)
    assert ([ids.tolist() for ids in tokens.prompts], tokens.total) == ([[1, 2, 3]], 3)
    several = registry.prompt_tokens(completion("id", ["a", "b"]), MODEL)
    assert [ids.tolist() for ids in several.prompts] == [[4], [5, 6]]
    path, body = renderer.asked[0]
    assert (path, body["messages"], body["stream"]) == (CHAT, chat().body["messages"], False)


def test_a_pod_of_the_model_renders(renderer: Renderer, registry: TokenizerRegistry) -> None:
    """With the source `pods` one of the candidates renders; without candidates the request is degraded."""
    renderer.answers = {CHAT: (200, json.dumps(rendered([7])).encode())}
    tokens = registry.prompt_tokens(chat(), "pods", None, [ready_pod(renderer.address)])
    assert [ids.tolist() for ids in tokens.prompts] == [[7]]
    assert registry.prompt_tokens(chat("new"), "pods").degraded == "tokenizer_unavailable"


@pytest.mark.parametrize("name", CASES)
def test_images_are_known_by_their_hashes(renderer: Renderer, registry: TokenizerRegistry, name: str) -> None:
    """vLLM's response for a prompt with images is known completely, and equal on repetition."""
    renderer.answers = {CHAT: (200, answer(name))}
    rendered = CASES[name]["rendered"]
    for _ in range(2):
        tokens = registry.prompt_tokens(chat(name), MODEL)
        assert [ids.tolist() for ids in tokens.prompts] == [rendered["token_ids"]]
        assert (tokens.total, tokens.partial) == (len(rendered["token_ids"]), None)
        hashes = (rendered["features"] or {}).get("mm_hashes", {})
        told = {item.identifier for media in tokens.media for item in media}
        assert told == {identifier for items in hashes.values() for identifier in items}
    ((_, asked),) = renderer.asked
    assert asked["return_mm_kwargs"] is False


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (RequestKind.RESPONSES, RESPONSES, {"input": "hello", "tools": [{"type": "web_search"}]}),
        (RequestKind.MESSAGES, MESSAGES, {"max_tokens": 5, "messages": [], "thinking": {"type": "disabled"}}),
    ],
)
def test_other_apis_use_their_own_render_endpoint(
    renderer: Renderer, registry: TokenizerRegistry, kind: RequestKind, path: str, body: dict[str, object]
) -> None:
    """Messages and responses requests are rendered by their own endpoint; a missing one is reported."""
    request = RouteRequest("id", kind, MODEL, body, body_bytes=400)
    renderer.answers = {path: (404, b"{}")}
    assert registry.prompt_tokens(request, MODEL).degraded == "tokenizer_unavailable"
    renderer.answers = {path: (200, answer("one_image"))}
    tokens = registry.prompt_tokens(request, MODEL)
    assert (len(tokens.media), tokens.partial) == (1, None)
    asked_path, asked = renderer.asked[-1]
    assert (asked_path, {name: asked[name] for name in body}) == (path, body)


def test_an_image_without_hash_ends_the_known_prefix(renderer: Renderer, registry: TokenizerRegistry) -> None:
    """Placeholders without hashes are counted, but not used as known tokens."""
    places = {"mm_placeholders": {"image": [{"offset": 4, "length": 2}, {"offset": 2, "length": 1}]}}
    renderer.answers = {CHAT: (200, json.dumps(rendered([1, 2, 3, 4, 5, 5, 6], features=places)).encode())}
    tokens = registry.prompt_tokens(chat(), MODEL)
    assert [ids.tolist() for ids in tokens.prompts] == [[1, 2]]
    assert (tokens.total, tokens.partial) == (7, "media")


OUTSIDE = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 9}]}}


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, b"{}", "tokenizer_unavailable"),
        (500, b"oops", "tokenizer_unavailable"),
        (400, b'{"error": {}}', "unsupported_prompt"),
        (200, b"[]", "tokenizer_unavailable"),
        (200, b'{"token_ids": ["a"]}', "tokenizer_unavailable"),
        (200, b'{"token_ids": [-1]}', "tokenizer_unavailable"),
        (200, b"[" * 100_000, "tokenizer_unavailable"),
        (200, json.dumps({"token_ids": [1, 2], "features": OUTSIDE}).encode(), "tokenizer_unavailable"),
    ],
)
def test_invalid_responses_degrade_with_a_reason(
    renderer: Renderer, registry: TokenizerRegistry, status: int, body: bytes, reason: str
) -> None:
    """After any invalid response the request is routed by load."""
    renderer.answers = {CHAT: (status, body)}
    tokens = registry.prompt_tokens(chat(), MODEL)
    assert (tokens.prompts, tokens.degraded) == ((), reason)


@pytest.mark.parametrize("body", ["[]", '[{"token_ids": [1]}]', '[{"token_ids": [1]}, {"token_ids": []}]'])
def test_incomplete_responses_are_rejected(
    renderer: Renderer, registry: TokenizerRegistry, body: str
) -> None:
    """A response with fewer prompts than requested, or with an empty one, is invalid."""
    renderer.answers = {COMPLETIONS: (200, body.encode()), CHAT: (200, b'{"token_ids": []}')}
    for request in (completion("id", ["a", "b"]), chat()):
        tokens = registry.prompt_tokens(request, MODEL)
        assert (tokens.prompts, tokens.degraded) == ((), "tokenizer_unavailable")


def test_cached_responses_expire(renderer: Renderer) -> None:
    """A response is cached for a minute, because template and date may change."""
    clock = Mock()
    tokenizer = RenderTokenizer(MODEL, f"http://{renderer.address}", clock)
    told = []
    for ids, clock.return_value in (([1], 0.0), ([2], 59.0), ([3], 61.0)):
        renderer.answers = {CHAT: (200, json.dumps(rendered(ids)).encode())}
        told += [prompt.tolist() for prompt in tokenizer.prompt_tokens(chat(), ()).prompts]
    assert told == [[1], [1], [3]]
    tokenizer.close()


def test_an_unreachable_server_has_a_reason(registry: TokenizerRegistry) -> None:
    """A refused connection degrades the request with its reason."""
    assert registry.prompt_tokens(chat(), "none").degraded == "tokenizer_unavailable"


def test_a_late_response_serves_the_retry(renderer: Renderer) -> None:
    """A response after the deadline is cached and serves the same request's retry."""
    renderer.go.clear()
    renderer.answers = {CHAT: (200, json.dumps(rendered([1, 2])).encode())}
    sources = {MODEL: f"http://{renderer.address}"}
    registry = TokenizerRegistry(open_tokenizers(sources), TokenizeOptions(deadline_s=0.05, threads=1))
    assert registry.prompt_tokens(chat(), MODEL).degraded == "tokenize_deadline"
    renderer.go.set()
    deadline = threading.Event()
    for _ in range(600):
        tokens = registry.prompt_tokens(chat(), MODEL)
        if tokens.degraded is None:
            break
        deadline.wait(0.1)
    assert [ids.tolist() for ids in tokens.prompts] == [[1, 2]]
    asked = len(renderer.asked)
    registry.prompt_tokens(chat(), MODEL)
    assert len(renderer.asked) == asked
    registry.close()
