"""Parsers of HTTP requests: path, headers and body in, RouteRequest out.

The longest matching path suffix selects the API. The router's own services parse four APIs and pass others
unread. In compatibility mode, the parsers and error texts are those of llm-d's endpoint picker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from router._pb import engine_requests_pb2 as pb
from router.errors import RequestError
from router.prompts.request import RequestKind, RouteRequest, api_request, read_fields

DEFAULT_PARSERS = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")

_CHAT, _COMPLETIONS, _OTHER = RequestKind.CHAT, RequestKind.COMPLETIONS, RequestKind.PASSTHROUGH
_VLLM_SERVICE, _VERTEX_SERVICE = "vllm.grpc.engine.VllmEngine", "PredictionService"
_GRPC_PREFIX_BYTES = 5
_INVALID_GRPC = "invalid or unsupported gRPC payload"
# Parts of error messages of Go's encoding/json.
_SPACE = b" \t\r\n"
_LITERALS = {b"t": b"true", b"f": b"false", b"n": b"null"}
_KINDS = {b"[": "array", b'"': "string", b"t": "bool", b"f": "bool"}
_TARGET = "Go value of type map[string]interface {}"
_ENDED = "unexpected end of JSON input"
_MESSAGES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_Message = TypeVar("_Message", bound=Message)


class BodyForm(Enum):
    """Encoding of an API's request bodies."""

    JSON = auto()
    VERTEX = auto()  # gRPC message that carries a JSON body
    VLLM = auto()  # gRPC message of vLLM, of which only the prompt and `stream` are read
    UNREAD = auto()


@dataclass(frozen=True, slots=True)
class Api:
    """API of a request path, with its required fields and error texts."""

    kind: RequestKind  # how the body is tokenized
    name: str = ""  # name in errors; "" for the router's own APIs, whose model, salt and stream are checked
    needs: tuple[str, ...] = ()  # alternative prompt fields; the first one present is used, one is required
    lack: str = ""  # error if no prompt field is present; "" to name the field
    broken: str = "error unmarshaling request bodyMap: "  # prefix of the error for a body that is no object
    needs_model: bool = True  # whether the body must name a model
    form: BodyForm = BodyForm.JSON
    salt_field: str = ""  # body field of the cache salt; "" if engines have none

    def fields(self, body: bytes | bytearray) -> dict[str, Any]:
        """Return the fields of a JSON body.

        Raises:
            RequestError: 400: the body is not a JSON object.
        """
        try:
            return read_fields(self.kind, body)
        except (ValueError, RecursionError) as error:
            if self.name:
                message = self.broken + _go_json_error(body)
            elif isinstance(error, msgspec.ValidationError):
                message = "the request body must be a JSON object"
            else:
                message = f"the request body is not valid JSON: {error}"
            raise RequestError(400, message) from error

    def prompt(self, fields: Mapping[str, Any]) -> Any:
        """Return the value of the prompt field.

        Raises:
            RequestError: 400: no prompt field is present.
        """
        found = next((fields[name] for name in self.needs if fields.get(name)), None)
        if found is None or (self.kind is _CHAT and not _are_messages(found)):
            field = f"valid {self.needs[0]}" if self.kind is _CHAT else self.needs[0]
            lack = self.lack or f"must have {field} field"
            raise RequestError(400, f"invalid {self.name} request: {lack}", self.needs[0])
        return found


_SALT = "cache_salt"
_CHAT_API = Api(_CHAT, "chat completions", ("messages",), salt_field=_SALT)
_COMPLETIONS_API = Api(_COMPLETIONS, "completions", ("prompt",), salt_field=_SALT)
_GRPC_API = Api(_COMPLETIONS, "gRPC", needs_model=False, form=BodyForm.VLLM)
_VERTEX_CHAT = Api(_CHAT, "chat completions", ("messages",), needs_model=False, form=BodyForm.VERTEX)
_VERTEX_RAW = Api(RequestKind.RESPONSES, "responses", ("input",), needs_model=False, form=BodyForm.VERTEX)
_UNREAD = Api(_OTHER, "unread", needs_model=False, form=BodyForm.UNREAD)

_OWN = "kvroute"
# APIs by path suffix, per parser; a parser without suffixes passes all other paths unread.
_APIS: Mapping[str, Mapping[str, Api]] = {
    _OWN: {
        "chat/completions": Api(_CHAT, salt_field=_SALT),
        "completions": Api(_COMPLETIONS, salt_field=_SALT),
        # vLLM's Messages API has no salt.
        "v1/messages": Api(RequestKind.MESSAGES),
        "v1/responses": Api(RequestKind.RESPONSES, salt_field=_SALT),
    },
    "openai-parser": {
        "chat/completions": _CHAT_API,
        "completions": _COMPLETIONS_API,
        "responses": Api(RequestKind.RESPONSES, "responses", ("input",), salt_field=_SALT),
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
            _COMPLETIONS,
            "generate",
            ("token_ids",),
            "must have non-empty token_ids field",
            "",
            salt_field=_SALT,
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
            salt_field="extra_key",
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
# gRPC service, per parser, whose other methods pass unread.
_SERVICES = {"vllmgrpc-parser": _VLLM_SERVICE, "vertexai-parser": _VERTEX_SERVICE}

PARSERS = tuple(name for name in _APIS if name != _OWN)  # parser types of llm-d's endpoint picker


class Parsers:
    """Parsers of one service, by path suffix.

    Args:
        names: Parser types in the configuration's order. The first parser of a path suffix is used. A parser
            without suffixes takes all other paths, so parsers after it have no effect.
    """

    def __init__(self, names: Sequence[str] = DEFAULT_PARSERS) -> None:
        names = names or DEFAULT_PARSERS
        self._apis: dict[str, Api] = {}
        self._rest: Api | None = None
        for name in names:
            for suffix, api in _APIS[name].items():
                self._apis.setdefault(suffix, api)
            if not _APIS[name]:
                self._rest = _UNREAD
                break
        self._suffixes = sorted(self._apis, key=len, reverse=True)
        self._services = [_SERVICES[name] for name in names if name in _SERVICES]
        # Gateways send few different paths.
        self._find_cached = lru_cache(maxsize=16)(self.find)

    def find(self, path: str) -> Api | None:
        """Return the API of a path, with or without a query string; None if no parser handles it."""
        plain = path.partition("?")[0].rstrip("/")
        for suffix in self._suffixes:
            if plain.endswith(suffix) and (len(plain) == len(suffix) or plain[-len(suffix) - 1] in "/."):
                return self._apis[suffix]
        return _UNREAD if any(f"{service}/" in path for service in self._services) else self._rest

    def parse(
        self,
        request_id: str,
        path: str,
        body: bytes | bytearray,
        candidates: frozenset[str] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[RouteRequest, Api]:
        """Parse an HTTP request.

        Returns:
            The request and its API. With a parser of llm-d, a body without model gives a request without
            model, even if the API requires one, because a rewrite may still set it.

        Raises:
            RequestError: 400: the body is invalid for its API, or no parser handles the path.
        """
        api = self._find_cached(path)
        if api is None:
            raise RequestError(400, f"no parser registered matching path suffix for: {path[:256]}")
        fields: dict[str, Any] = {}
        if api.form is BodyForm.VLLM:
            fields = _vllm_fields(body)
        elif api.form is not BodyForm.UNREAD:
            fields = api.fields(body if api.form is BodyForm.JSON else _carried_body(body))
            if not api.name:
                return api_request(request_id, api.kind, fields, len(body), candidates, headers), api
            prompt = api.prompt(fields)
            if api.kind is _COMPLETIONS:
                fields["prompt"] = prompt
        # SGLang names its cache salt extra_key.
        model, salt = fields.get("model"), fields.get("cache_salt", fields.get("extra_key"))
        request = RouteRequest(
            request_id,
            api.kind,
            model if isinstance(model, str) and model else None,
            fields,
            len(body),
            salt if isinstance(salt, str) and salt else None,
            candidates,
            headers,
        )
        return request, api


# Parsers of the router's own services: four APIs; others pass unread.
OWN_PARSERS = Parsers([_OWN, "passthrough-parser"])


def _are_messages(text: msgspec.Raw) -> bool:
    try:
        return bool(_MESSAGES.decode(text))
    except (ValueError, RecursionError):
        return False


def _vllm_fields(body: bytes | bytearray) -> dict[str, Any]:
    message = _unframed(body, pb.VllmRequest)
    match message.WhichOneof("input"):
        case "text":
            prompt: str | list[int] = message.text
        case "tokenized":
            prompt = list(message.tokenized.input_ids)
        case _:
            raise RequestError(400, "not supported request inputType")
    return {"prompt": prompt, "stream": message.stream}


def _carried_body(body: bytes | bytearray) -> bytes:
    message = _unframed(body, pb.VertexRequest)
    if not message.HasField("http_body"):
        raise RequestError(400, "the request has no HttpBody")
    data: bytes = message.http_body.data
    return data


def _unframed(body: bytes | bytearray, message: type[_Message]) -> _Message:
    """Parse a body that is one uncompressed gRPC message with its length prefix."""
    size = len(body) - _GRPC_PREFIX_BYTES
    if size < 0 or body[0] != 0 or int.from_bytes(body[1:_GRPC_PREFIX_BYTES], "big") != size:
        raise RequestError(400, _INVALID_GRPC)
    try:
        return message.FromString(bytes(body[_GRPC_PREFIX_BYTES:]))
    except DecodeError as error:
        raise RequestError(400, _INVALID_GRPC) from error


def _go_json_error(body: bytes | bytearray) -> str:
    """Return the error text of Go's encoding/json, which clients of llm-d may match, for an invalid body."""
    # Errors at the start or end of the body have Go's text; others have msgspec's.
    text = bytes(body).strip(_SPACE)
    first = text[:1]
    if not first:
        return _ENDED
    if first in _LITERALS:
        literal = _LITERALS[first]
        for at, letter in enumerate(literal):
            if at >= len(text):
                return _ENDED
            if text[at] != letter:
                found, expected = _quoted(text[at]), _quoted(letter)
                return f"invalid character {found} in literal {literal.decode()} (expecting {expected})"
    elif first not in b'{["-0123456789':
        return f"invalid character {_quoted(text[0])} looking for beginning of value"
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        return _ENDED if "truncated" in str(error) else str(error)
    return f"json: cannot unmarshal {_KINDS.get(first, 'number')} into {_TARGET}"


def _quoted(byte: int) -> str:
    return "'\\''" if byte == ord("'") else repr(chr(byte))
