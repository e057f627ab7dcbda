"""Tokens from a server's render endpoints, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from router.request import RequestKind, RouteRequest
from router.tokens import TokenizeOptions, TokenizerRegistry
from tests.unit.router_support import completion, ready_pod

MODEL = "m"
CHAT = "/v1/chat/completions/render"
COMPLETIONS = "/v1/completions/render"


@dataclass
class Renderer:
    """A server that answers what a test tells it to.

    Attributes:
        answers: Path -> status and body.
        asked: Path and body of every request.
        go: Held back until set.
    """

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    address: str = ""


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    """A running renderer."""
    told = Renderer()
    told.go.set()

    class Handler(BaseHTTPRequestHandler):
        """Answers from what the test told."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Reads, waits, answers."""
            body = self.rfile.read(int(self.headers["content-length"]))
            told.asked.append((self.path, json.loads(body)))
            told.go.wait(60)
            status, answer = told.answers[self.path]
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told.address = f"127.0.0.1:{server.server_port}"
    yield told
    told.go.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def registry(renderer: Renderer) -> Iterator[TokenizerRegistry]:
    """A router's tokenizers: one at a URL, one at the pods."""
    sources = {MODEL: f"http://{renderer.address}", "pods": "pods", "none": "http://127.0.0.1:1"}
    made = TokenizerRegistry.load(sources, TokenizeOptions(deadline_s=30))
    yield made
    made.close()


def chat(text: str = "hello") -> RouteRequest:
    """A chat."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True}
    return RouteRequest("id", RequestKind.CHAT, MODEL, body, body_bytes=400)


def rendered(ids: list[int], **fields: object) -> dict[str, object]:
    """A rendered prompt with more in it than is read."""
    return {"request_id": "x", "token_ids": ids, "sampling_params": {"n": 1}, **fields}


def test_ids_come_from_the_server(renderer: Renderer, registry: TokenizerRegistry) -> None:
    """A chat's one prompt and a completion's several have the ids that the server tells."""
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


def test_a_pod_of_the_model_is_asked(renderer: Renderer, registry: TokenizerRegistry) -> None:
    """With the source `pods` one of the candidates renders; without any the reason is told."""
    renderer.answers = {CHAT: (200, json.dumps(rendered([7])).encode())}
    tokens = registry.prompt_tokens(chat(), "pods", None, [ready_pod(renderer.address)])
    assert [ids.tolist() for ids in tokens.prompts] == [[7]]
    assert registry.prompt_tokens(chat("new"), "pods").degraded == "tokenizer_unavailable"


def test_only_what_stands_in_front_of_an_image_is_known(
    renderer: Renderer, registry: TokenizerRegistry
) -> None:
    """Placeholders are the same for every image, so they are counted but not taken for known."""
    places = {"mm_placeholders": {"image": [{"offset": 4, "length": 2}, {"offset": 2, "length": 1}]}}
    renderer.answers = {CHAT: (200, json.dumps(rendered([1, 2, 3, 4, 5, 5, 6], features=places)).encode())}
    tokens = registry.prompt_tokens(chat(), MODEL)
    assert [ids.tolist() for ids in tokens.prompts] == [[1, 2]]
    assert (tokens.total, tokens.partial) == (7, "media")


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
    ],
)
def test_no_ids_have_a_reason(
    renderer: Renderer, registry: TokenizerRegistry, status: int, body: bytes, reason: str
) -> None:
    """Whatever a server answers, the request goes on by load alone."""
    renderer.answers = {CHAT: (status, body)}
    tokens = registry.prompt_tokens(chat(), MODEL)
    assert (tokens.prompts, tokens.degraded) == ((), reason)


def test_a_server_that_is_not_there_has_a_reason(registry: TokenizerRegistry) -> None:
    """A refused connection is told as such."""
    assert registry.prompt_tokens(chat(), "none").degraded == "tokenizer_unavailable"


def test_a_late_answer_serves_the_next_try(renderer: Renderer) -> None:
    """Beyond the deadline the pick goes by load; the answer is kept, and the same request then has it."""
    renderer.go.clear()
    renderer.answers = {CHAT: (200, json.dumps(rendered([1, 2])).encode())}
    sources = {MODEL: f"http://{renderer.address}"}
    registry = TokenizerRegistry.load(sources, TokenizeOptions(deadline_s=0.05, threads=1))
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
