"""What a client asks for: path and body bytes in, a typed RouteRequest out.

Knows the fields of the OpenAI and Anthropic APIs that routing needs and leaves the rest alone; knows no gRPC,
tokens or pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from router.errors import RequestError

MODEL_CHARS_MAX = 4096
"""A model is named by a repository or a path; decisions that are kept keep its name."""

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, Any])


class RequestKind(StrEnum):
    """Which API a request speaks, as far as routing cares."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    PASSTHROUGH = "passthrough"


class RouteRequest(msgspec.Struct, frozen=True):
    """One request to be routed.

    Attributes:
        request_id: Joins this request with what is later heard of it.
        model: As the pod is asked for it: a base model or a LoRA adapter; None where the API is not known.
        body: The decoded JSON body of a known API, checked only in the fields named here; else empty. A
            chat's `messages` may be JSON text still (msgspec.Raw), of which only the form is checked.
        body_bytes: Size of the body as it came.
        cache_salt: vLLM's field that keeps this request's cache apart from others'.
        candidates: "ip:port" (or "ip") of the pods the gateway allows; None: all.
        headers: By lower-case name; objective, session and trace context are read from them.
        client_model: As the client named the model, where it was rewritten; "" where it named none.
    """

    request_id: str
    kind: RequestKind
    model: str | None = None
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    body_bytes: int = 0
    cache_salt: str | None = None
    candidates: frozenset[str] | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    client_model: str | None = None


def http_request(
    request_id: str,
    path: str,
    body: bytes | bytearray,
    candidates: frozenset[str] | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> RouteRequest:
    """Reads an HTTP request.

    Args:
        path: With or without a query string; the longest known suffix decides the API.
        body: The whole body; not read where the API is not known.

    Raises:
        RequestError: 400, when a known API's body is not what that API allows.
    """
    kind = request_kind(path)
    if kind is RequestKind.PASSTHROUGH:
        return RouteRequest(request_id, kind, body_bytes=len(body), candidates=candidates, headers=headers)
    try:
        fields = read_fields(kind, body)
    except msgspec.ValidationError as error:
        raise RequestError(400, "the request body must be a JSON object") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request body is not valid JSON: {error}") from error
    return api_request(request_id, kind, fields, len(body), candidates, headers)


def read_fields(kind: RequestKind, body: bytes | bytearray) -> dict[str, Any]:
    """The fields of a known API's body; a chat's messages are left as JSON text, most of which may be known.

    Raises:
        msgspec.ValidationError: It is no object.
        ValueError, RecursionError: It is no JSON.
    """
    if kind is not RequestKind.CHAT:
        return _FIELDS.decode(body)
    fields: dict[str, Any] = _RAW_FIELDS.decode(body)
    for name, value in fields.items():
        if name != "messages":
            fields[name] = msgspec.json.decode(value)
    return fields


def api_request(
    request_id: str,
    kind: RequestKind,
    body: Mapping[str, Any],
    body_bytes: int,
    candidates: frozenset[str] | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> RouteRequest:
    """Checks the decoded body of a known API.

    Raises:
        RequestError: 400, naming the field.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError(400, "model must be a non-empty string", "model")
    cache_salt = body.get("cache_salt")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(400, "cache_salt must be a non-empty string", "cache_salt")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(400, "stream must be true or false", "stream")
    return RouteRequest(request_id, kind, model, body, body_bytes, cache_salt, candidates, headers)


@lru_cache(maxsize=16)
def request_kind(path: str) -> RequestKind:
    """The API that a path speaks, by its longest known suffix."""
    plain = path.partition("?")[0].rstrip("/")
    if plain.endswith("/chat/completions"):
        return RequestKind.CHAT
    if plain.endswith("/completions"):
        return RequestKind.COMPLETIONS
    if plain.endswith("/v1/messages"):
        return RequestKind.MESSAGES
    if plain.endswith("/v1/responses"):
        return RequestKind.RESPONSES
    return RequestKind.PASSTHROUGH


def too_large(limit_bytes: int) -> RequestError:
    """The answer to a body above the limit."""
    return RequestError(413, f"the request body is larger than this router's limit of {limit_bytes} bytes")
