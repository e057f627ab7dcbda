"""`kvroute tokenizer` and its client over a Unix socket."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router._pb import tokenizer_pb2
from router.errors import ConfigError, ListenError, RequestError
from router.prompts.parsers import OWN_PARSERS
from router.prompts.remote_tokenizers import SERVICE
from router.prompts.request import PromptTokens, RequestKind, RouteRequest
from router.prompts.tokenizer_server import TokenizerServer
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.router.bench import TOKENIZER, completion
from tests.support.stubs import tokenizer_stub
from tests.support.tokenization.images import image_part, write_model
from tokenization import TINY_DIRECTORY
from tokenization.apis.anthropic import messages_as_chat
from tokenization.apis.responses import responses_as_chat
from tokenization.prompts import chat_prompt

MODEL = "m"
DEADLINE_S = 300.0


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """Return the path of the server's socket."""
    return tmp_path / "tokenizer.socket"


@pytest.fixture
def server(socket: Path) -> Iterator[TokenizerServer]:
    """Yield a server of the packaged tokenizer."""
    running = TokenizerServer(socket, {MODEL: str(TINY_DIRECTORY)}, threads=2)
    running.start()
    yield running
    running.close()


@pytest.fixture
def registry(socket: Path) -> Iterator[TokenizerRegistry]:
    """Yield a registry with one served and one unknown model."""
    sources = {MODEL: f"unix:{socket}", "other": f"unix:{socket}"}
    made = TokenizerRegistry(open_tokenizers(sources), TokenizeOptions(deadline_s=DEADLINE_S))
    yield made
    made.close()


def chat(**fields: object) -> RouteRequest:
    """Return a chat request."""
    body = {"messages": [{"role": "user", "content": "Hello there"}], **fields}
    return RouteRequest("id", RequestKind.CHAT, MODEL, body, body_bytes=100)


def until(registry: TokenizerRegistry, degraded: str | None) -> PromptTokens:
    """Request tokens until the result is degraded for this reason."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (tokens := registry.prompt_tokens(chat(), MODEL)).degraded != degraded:
        assert time.monotonic() < deadline_s, tokens.degraded
        time.sleep(0.05)
    return tokens


@pytest.mark.usefixtures("server")
def test_the_ids_equal_local_ones(registry: TokenizerRegistry) -> None:
    """Requests of all APIs have the same token ids as with a local tokenizer."""
    tokens = registry.prompt_tokens(chat(), MODEL)
    assert tokens.prompts[0].tolist() == chat_prompt(chat().body, TOKENIZER).tolist()
    assert (tokens.total, tokens.degraded, tokens.partial) == (len(tokens.prompts[0]), None, None)
    several = registry.prompt_tokens(completion("id", ["one", "two words"]), MODEL)
    assert [ids.tolist() for ids in several.prompts] == [
        TOKENIZER.encode("one"),
        TOKENIZER.encode("two words"),
    ]
    body = {"input": "Hello there", "instructions": "Be brief."}
    responses = RouteRequest("id", RequestKind.RESPONSES, MODEL, body, body_bytes=100)
    (ids,) = registry.prompt_tokens(responses, MODEL).prompts
    assert ids.tolist() == chat_prompt(responses_as_chat(body), TOKENIZER).tolist()
    body = {"system": "Be brief.", "messages": [{"role": "user", "content": "Hello there"}]}
    messages = RouteRequest("id", RequestKind.MESSAGES, MODEL, body, body_bytes=100)
    (ids,) = registry.prompt_tokens(messages, MODEL).prompts
    assert ids.tolist() == chat_prompt(messages_as_chat(body), TOKENIZER).tolist()
    unknown = RouteRequest("id", RequestKind.RESPONSES, MODEL, {**body, "prompt": {"id": "p"}}, 100)
    assert registry.prompt_tokens(unknown, MODEL).degraded == "unsupported_prompt"


@pytest.mark.usefixtures("server")
def test_growing_chats_have_the_same_ids(registry: TokenizerRegistry) -> None:
    """A chat that grows turn by turn has the ids of a local tokenizer."""
    messages = [{"role": "user", "content": "word " * 5000}]
    for turn in range(3):
        body = msgspec.json.encode({"model": MODEL, "messages": messages})
        (ids,) = registry.prompt_tokens(
            OWN_PARSERS.parse("id", "/v1/chat/completions", body)[0], MODEL
        ).prompts
        assert ids.tolist() == chat_prompt({"messages": messages}, TOKENIZER).tolist()
        messages += {"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "Why?"}


@pytest.mark.usefixtures("server")
def test_errors_and_reasons_are_passed_on(registry: TokenizerRegistry) -> None:
    """A malformed prompt is a 400 with its field; unknown or partial ids carry their reason."""
    with pytest.raises(RequestError) as caught:
        registry.prompt_tokens(chat(add_generation_prompt="perhaps"), MODEL)
    assert (caught.value.status, caught.value.param) == (400, "add_generation_prompt")
    odd = chat(messages=[{"role": "user", "content": [{"type": "hologram"}]}])
    assert registry.prompt_tokens(odd, MODEL).degraded == "unsupported_prompt"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert registry.prompt_tokens(chat(messages=image), MODEL).partial == "media"
    assert registry.prompt_tokens(completion("id", "x" * 10_000), MODEL, 8).degraded == "longer_than_context"
    assert registry.prompt_tokens(chat(), "other").degraded == "tokenizer_unavailable"


def test_images_are_passed_on_with_their_hashes(socket: Path, tmp_path: Path) -> None:
    """A router that reads media gets all ids; one that does not gets those before the first image."""
    (tmp_path / "model").mkdir()
    model = write_model(tmp_path / "model", "qwen")
    content = [image_part(60, 60, "a"), {"type": "text", "text": "or"}, image_part(90, 30, "b")]
    request = chat(messages=[{"role": "user", "content": content}])
    here = TokenizerRegistry(open_tokenizers({MODEL: model})).prompt_tokens(request, MODEL)
    served = TokenizerServer(socket, {MODEL: str(model)}, threads=1)
    served.start()
    sidecar = TokenizerRegistry(
        open_tokenizers({MODEL: f"unix:{socket}"}), TokenizeOptions(deadline_s=DEADLINE_S)
    )
    there = sidecar.prompt_tokens(request, MODEL)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        body = msgspec.json.encode(request.body)
        message = tokenizer_pb2.TokenizeRequest(model=MODEL, api=tokenizer_pb2.API_CHAT, body=body)
        older = tokenizer_stub(channel).Tokenize(message, timeout=DEADLINE_S)
    sidecar.close()
    served.close()
    (ids,), (items,) = here.prompts, here.media
    assert there.prompts[0].tolist() == ids.tolist()
    assert (there.media, there.total, there.partial) == (here.media, len(ids), None)
    assert [item.identifier for item in items] == ["a", "b"]
    assert (older.prompts[0], older.total) == (ids[: items[0].offset].tobytes(), len(ids))
    assert (older.partial, len(older.media)) == ("media", 0)


def test_a_restart_affects_only_requests_meanwhile(registry: TokenizerRegistry, socket: Path) -> None:
    """Without the process, requests are routed by load; a new process is found, also after a kill."""
    run = "import sys; from kvroute.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "tokenizer", "--socket", str(socket)]
    command += ["--model", f"{MODEL}={TINY_DIRECTORY}"]
    assert registry.prompt_tokens(chat(), MODEL).degraded == "tokenizer_unavailable"
    for sent, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            assert until(registry, None).total > 0
            process.send_signal(sent)
            assert process.wait(300) == status
        until(registry, "tokenizer_unavailable")


class HeldServer(TokenizerServer):
    """Server that answers only when released."""

    def tokenize(
        self, message: tokenizer_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        """Wait, then answer."""
        assert self.go.wait(300)
        return super().tokenize(message, context)


def test_a_late_response_is_a_deadline(socket: Path) -> None:
    """A process that is too slow degrades the request at its deadline."""
    held = HeldServer(socket, {MODEL: str(TINY_DIRECTORY)}, threads=1)
    held.go = threading.Event()
    held.go.set()
    held.start()
    registry = TokenizerRegistry(open_tokenizers({MODEL: f"unix:{socket}"}), TokenizeOptions(deadline_s=0.2))
    until(registry, None)
    held.go.clear()
    assert registry.prompt_tokens(chat(), MODEL).degraded == "tokenize_deadline"
    held.go.set()
    until(registry, None)
    registry.close()
    held.close()


@pytest.mark.usefixtures("server")
def test_health_is_served(socket: Path) -> None:
    """The standard health service reports the process and the service."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        for service in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=300).status
            assert status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("api", "body"), [(0, b"{}"), (1, b"[]"), (1, b"{"), (7, b"{}"), (2, b"[" * 100_000)]
)
def test_a_hostile_call_is_rejected(socket: Path, api: int, body: bytes) -> None:
    """A call that is no request of a known API is INVALID_ARGUMENT, and the next call is served."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = tokenizer_stub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(tokenizer_pb2.TokenizeRequest(model=MODEL, api=api, body=body), timeout=300)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        fine = tokenizer_pb2.TokenizeRequest(model=MODEL, api=2, body=b'{"prompt": "x"}')
        assert len(stub.Tokenize(fine, timeout=300).prompts) == 1


@pytest.mark.usefixtures("server")
def test_a_socket_in_use_is_not_replaced(socket: Path, tmp_path: Path) -> None:
    """A second process on the same path, or a path of another file, raises ListenError."""
    with pytest.raises(ListenError, match="another process listens"):
        TokenizerServer(socket, {MODEL: str(TINY_DIRECTORY)}, threads=1)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ListenError, match="is not a socket"):
        TokenizerServer(tmp_path / "file", {MODEL: str(TINY_DIRECTORY)}, threads=1)
    with pytest.raises(ListenError, match="no directory"):
        TokenizerServer(tmp_path / "none" / "s", {MODEL: str(TINY_DIRECTORY)}, threads=1)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("source", ["pods", "http://127.0.0.1:1", "unix:/none"])
def test_remote_tokenizers_are_not_served(socket: Path, source: str) -> None:
    """A source in another process raises ConfigError."""
    with pytest.raises(ConfigError, match="must be a directory or hf:"):
        TokenizerServer(socket, {MODEL: source}, threads=1)
