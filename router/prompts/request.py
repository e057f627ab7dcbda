"""A request to be routed, and what its fields of the OpenAI and Anthropic APIs mean for its pick.

Which API a path speaks, the parsers say. Knows no gRPC, tokens or pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from router.errors import RequestError

MODEL_CHARS_MAX = 4096  # a model is named by a repository or a path; decisions that are kept keep its name
# Why a request is picked by load alone whose whole prompt every pod will compute.
CACHE_NOT_READ = "cache_not_read"

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, Any])


class RequestKind(StrEnum):
    """APIs, as far as routing cares."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    PASSTHROUGH = "passthrough"


class RouteRequest(msgspec.Struct, frozen=True):
    """One request to be routed."""

    request_id: str  # joins this request with what is later heard of it
    kind: RequestKind
    model: str | None = None  # as the pod is asked for it: base model or LoRA adapter; None: unknown API
    # The decoded JSON body of a known API, checked only in the fields named here; else empty. A chat's
    # `messages` may be JSON text still (msgspec.Raw), of which only the form is checked.
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    body_bytes: int = 0  # size of the body as it came
    cache_salt: str | None = None  # vLLM's field that keeps this request's cache apart from others'
    candidates: frozenset[str] | None = None  # "ip:port" (or "ip") of the pods the gateway allows; None: all
    # By lower-case name; objective, session and trace context are read from them.
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    client_model: str | None = None  # as the client named it, where it was rewritten; "": it named none


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


def too_large(limit_bytes: int) -> RequestError:
    """The answer to a body above the limit."""
    return RequestError(413, f"the request body is larger than this router's limit of {limit_bytes} bytes")


def reads_cache(request: RouteRequest) -> bool:
    """Whether an engine looks the prompt up in its cache.

    Log probabilities of a prompt's tokens are computed with the prompt. vLLM then reads no cache at all, and
    SGLang only up to the first token that is asked for: predicted is nothing for either.
    """
    if request.kind not in (RequestKind.CHAT, RequestKind.COMPLETIONS):
        return True
    body, sampling = request.body, _sampling(request.body)
    if isinstance(skips := sampling.get("skip_reading_prefix_cache"), bool):
        return not skips
    names = ((body, "prompt_logprobs"), (sampling, "prompt_logprobs"), (sampling, "prompt_logprob_token_ids"))
    if any(fields.get(name) is not None for fields, name in names) or _starts_in_prompt(body):
        return False
    if not body.get("echo"):
        return True
    # A chat that does not say how many alternatives it wants wants 0: the tokens' own log probabilities.
    if request.kind is RequestKind.CHAT:
        return body.get("top_logprobs", 0) is None
    return body.get("logprobs") is None


def usage_tells_all(request: RouteRequest, prompts: int) -> bool:
    """Whether `cached_tokens` of the answer's usage counts all that is predicted, and nothing else.

    Of several samples vLLM tells one's, which may have found what another has just computed; of several
    prompts it tells one's.
    """
    body = request.body
    samples = [fields.get("n") for fields in (body, _sampling(body))]
    return prompts == 1 and all(n is None or n == 1 for n in samples)


def _sampling(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of vLLM's /inference/v1/generate and SGLang's /generate."""
    sampling = body.get("sampling_params")
    return sampling if isinstance(sampling, dict) else {}


def _starts_in_prompt(body: Mapping[str, Any]) -> bool:
    """SGLang's own words for log probabilities of the prompt."""
    start = body.get("logprob_start_len")
    return bool(body.get("return_logprob")) and isinstance(start, int) and start >= 0
