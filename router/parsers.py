"""The APIs that the reference picker parses: path, headers and body of an HTTP request in, a request out.

Which APIs there are is configured; the longest path suffix decides, and a parser without paths takes the rest
by load alone. Refusals are in the reference's words. Knows no gRPC streams, pods or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from router.errors import RequestError
from router.go_json import go_json_error
from router.grpc_body import grpc_prompt, wrapped_http_body
from router.request import RequestKind, RouteRequest

DEFAULT_PARSERS = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")

_PATH_HEADERS = (":path", "x-original-path", "x-forwarded-path")
_DEFAULT_PATH = "/v1/completions"
_CHAT, _COMPLETIONS, _OTHER = RequestKind.CHAT, RequestKind.COMPLETIONS, RequestKind.PASSTHROUGH
_VLLM_SERVICE, _VERTEX_SERVICE = "vllm.grpc.engine.VllmEngine", "PredictionService"


@dataclass(frozen=True, slots=True)
class Api:
    """One API of a parser.

    Attributes:
        kind: What it is like to the tokenizer.
        name: As complaints call it.
        needs: Fields of which one must be there; the first one found is the prompt.
        lack: The complaint where none is; "": by their names.
        broken: How the complaint begins where the body is no JSON object.
        needs_model: Whether a model must be named.
        is_json: Whether its bodies are JSON, whose model can be rewritten.
        is_opaque: Whether bodies have fields that no parser here reads.
    """

    kind: RequestKind
    name: str
    needs: tuple[str, ...] = ()
    lack: str = ""
    broken: str = "error unmarshaling request bodyMap: "
    needs_model: bool = True
    is_json: bool = True
    is_opaque: bool = False

    def prompt(self, body: Mapping[str, Any]) -> Any:
        """The field with the prompt.

        Raises:
            RequestError: 400, there is none.
        """
        found = next((body[field] for field in self.needs if body.get(field)), None)
        if found is None or (self.kind is _CHAT and not _are_messages(found)):
            field = f"valid {self.needs[0]}" if self.kind is _CHAT else self.needs[0]
            lack = self.lack or f"must have {field} field"
            raise RequestError(400, f"invalid {self.name} request: {lack}", self.needs[0])
        return found


_CHAT_API = Api(_CHAT, "chat completions", ("messages",))
_COMPLETIONS_API = Api(_COMPLETIONS, "completions", ("prompt",))
_GRPC_API = Api(_COMPLETIONS, "gRPC", needs_model=False, is_json=False, is_opaque=True)
_VERTEX_CHAT = Api(_CHAT, "chat completions", ("messages",), needs_model=False, is_json=False)
_VERTEX_RAW = Api(RequestKind.RESPONSES, "responses", ("input",), needs_model=False, is_json=False)
_PASSTHROUGH = Api(_OTHER, "passthrough", needs_model=False, is_json=False)
_UNREAD = Api(_OTHER, "unread", needs_model=False, is_json=False)

# By parser: its APIs by path suffix.
_APIS: Mapping[str, Mapping[str, Api]] = {
    "openai-parser": {
        "chat/completions": _CHAT_API,
        "completions": _COMPLETIONS_API,
        "responses": Api(RequestKind.RESPONSES, "responses", ("input",)),
        "embeddings": Api(_OTHER, "embeddings", ("input",)),
        "conversations": Api(_OTHER, "conversations", ("items",)),
        "images/generations": Api(_OTHER, "images generations", ("prompt",)),
        "chat/completions/render": _CHAT_API,
        "completions/render": _COMPLETIONS_API,
    },
    "anthropic-parser": {
        "v1/messages": Api(
            RequestKind.MESSAGES,
            "messages",
            ("messages",),
            "must have at least one message",
            "error unmarshaling request body: ",
        ),
        "v1/messages/count_tokens": _UNREAD,
    },
    "vllmhttp-parser": {
        "inference/v1/generate": Api(
            _COMPLETIONS, "generate", ("token_ids",), "must have non-empty token_ids field", ""
        )
    },
    "sglanghttp-parser": {
        "generate": Api(
            _COMPLETIONS,
            "generate",
            ("input_ids", "text"),
            "input_ids must be provided",
            "invalid generate request: ",
            needs_model=False,
        )
    },
    "vllmgrpc-parser": {f"{_VLLM_SERVICE}/Generate": _GRPC_API, f"{_VLLM_SERVICE}/Embed": _GRPC_API},
    "vertexai-parser": {
        f"{_VERTEX_SERVICE}/ChatCompletions": _VERTEX_CHAT,
        f"{_VERTEX_SERVICE}/RawPredict": _VERTEX_RAW,
        f"{_VERTEX_SERVICE}/StreamRawPredict": _VERTEX_RAW,
    },
    "passthrough-parser": {},
}
# By parser: the gRPC service whose further methods it hands on unread.
_SERVICES = {"vllmgrpc-parser": _VLLM_SERVICE, "vertexai-parser": _VERTEX_SERVICE}

PARSERS = tuple(_APIS)
"""Types of all parsers."""


class PathTable:
    """Which parser a path belongs to.

    The longest suffix wins, then the first that was registered. A parser without paths takes what is left,
    and those after it count no more; nor does a second of the same name.
    """

    def __init__(self, parsers: Iterable[tuple[str, Sequence[str]]]) -> None:
        self._suffixes: dict[str, str] = {}
        self._fallback: str | None = None
        names: set[str] = set()
        for name, suffixes in parsers:
            if name in names:
                continue
            names.add(name)
            for suffix in suffixes:
                self._suffixes.setdefault(suffix, name)
            if not suffixes:
                self._fallback = name
                break
        self._by_length = sorted(self._suffixes, key=len, reverse=True)

    def find(self, path: str) -> tuple[str | None, str]:
        """The parser's name (None: no parser takes it) and the suffix ("": by fallback)."""
        plain = path.partition("?")[0].rstrip("/")
        for suffix in self._by_length:
            if plain.endswith(suffix) and (len(plain) == len(suffix) or plain[-len(suffix) - 1] in "/."):
                return self._suffixes[suffix], suffix
        return self._fallback, ""


class Parsers:
    """The configured parsers.

    Args:
        names: Their types, in the configuration's order.
    """

    def __init__(self, names: Sequence[str] = DEFAULT_PARSERS) -> None:
        names = names or DEFAULT_PARSERS
        self._table = PathTable((name, tuple(_APIS[name])) for name in names)
        self._services = [_SERVICES[name] for name in names if name in _SERVICES]

    def parse(self, request: RouteRequest, body: bytes) -> tuple[RouteRequest, Api]:
        """Reads the body of a request of which the headers are known.

        Returns:
            The request and its API. Where the body names no model the request has none either, whatever the
            API needs: it may yet be rewritten.

        Raises:
            RequestError: 400, in the reference's words.
        """
        headers = request.headers
        path = next((headers[name] for name in _PATH_HEADERS if headers.get(name)), _DEFAULT_PATH)
        api = self._api(path)
        request = replace(request, kind=api.kind, body_bytes=len(body))
        if api.kind is _OTHER and not api.is_json:
            return request, api
        if api is _GRPC_API:
            prompt, streams = grpc_prompt(body)
            return replace(request, body={"prompt": prompt, "stream": streams}), api
        if api in (_VERTEX_CHAT, _VERTEX_RAW):
            body = wrapped_http_body(body)
        return _json_request(request, api, body), api

    def _api(self, path: str) -> Api:
        name, suffix = self._table.find(path)
        if not suffix and any(f"{service}/" in path for service in self._services):
            return _UNREAD
        if name is None:
            raise RequestError(400, f"no parser registered matching path suffix for: {path[:256]}")
        return _APIS[name].get(suffix, _PASSTHROUGH)


def _json_request(request: RouteRequest, api: Api, data: bytes) -> RouteRequest:
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, api.broken + go_json_error(data, str(error))) from error
    if not isinstance(body, dict):
        raise RequestError(400, api.broken + go_json_error(data, ""))
    prompt = api.prompt(body)
    if api.kind is _COMPLETIONS:
        body["prompt"] = prompt
    # SGLang's name for what keeps caches apart is another.
    model, salt = body.get("model"), body.get("cache_salt", body.get("extra_key"))
    return replace(
        request,
        model=model if isinstance(model, str) and model else None,
        body=body,
        cache_salt=salt if isinstance(salt, str) and salt else None,
    )


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)
