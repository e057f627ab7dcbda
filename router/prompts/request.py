"""Request to be routed, its token ids, and the fields of OpenAI and Anthropic APIs that affect its pick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from indexer.keys import MultimodalItem, extras_of_prompt
from router.errors import RequestError
from tokenization import TokenIds

MODEL_CHARS_MAX = 4096  # enough for a repository or path; the decision log keeps the name
# Reason to route by load alone: every engine will reject the prompt.
LONGER_THAN_CONTEXT = "longer_than_context"
# Reason to route by load alone: more than PROMPTS_MAX prompts.
TOO_MANY_PROMPTS = "too_many_prompts"

PROMPTS_MAX = 64  # each prompt is tokenized and matched separately while other picks wait
MEDIA = "media"  # reason why only a prefix of a prompt is known: an image, audio or video follows
# Reason to route by load alone: every pod will compute the whole prompt.
CACHE_NOT_READ = "cache_not_read"
SESSION_ID_HEADER = "x-session-id"
# Session headers of coding agents, in the order of precedence.
AGENT_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
_ID_CHARS_MAX = 256
_BYTES_PER_TOKEN = 4
# Samples of one prompt; with beam search `n` is the number of beams.
_SAMPLES = ("n", "best_of")

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, Any])


class RequestKind(StrEnum):
    """API of a request, as far as routing distinguishes it."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    PASSTHROUGH = "passthrough"


# APIs for which vLLM obeys RANK_HEADER.
RANKED_KINDS = frozenset({RequestKind.CHAT, RequestKind.COMPLETIONS, RequestKind.MESSAGES})
RANK_HEADER = "x-data-parallel-rank"


class RouteRequest(msgspec.Struct, frozen=True):
    """Request to be routed."""

    request_id: str  # identifies the request in later reports of its lifecycle
    kind: RequestKind
    model: str | None = None  # base model or LoRA adapter sent to the pod; None for an unknown API
    # Decoded JSON body of a known API, of which only the fields here are validated; else empty. A chat's
    # `messages` may still be unparsed JSON (msgspec.Raw).
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    body_bytes: int = 0  # size of the body as received
    cache_salt: str | None = None  # vLLM's field that separates this request's cache entries from others'
    candidates: frozenset[str] | None = None  # "ip:port" or "ip" of pods the gateway allows; None for all
    # Headers by lower-case name: objective, session and trace context.
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    client_model: str | None = None  # the client's model if it was rewritten; "" if the client named none
    pool: str = ""  # InferencePool whose pods may serve it, where the router has several; else ""
    dry: bool = False  # whether to decide only: it is not sent, and changes and counts nothing


# Media items of one prompt, in order of their placeholders.
PromptMedia: TypeAlias = tuple[MultimodalItem, ...]


class PromptTokens(msgspec.Struct, frozen=True):
    """Token ids of a request's prompts, as far as they are known."""

    prompts: tuple[TokenIds, ...]  # token ids per prompt (completions may have several); empty if unknown
    total: int  # number of prompt tokens, estimated from the body's size if unknown
    degraded: str | None = None  # why the ids are unknown; None if they are known
    partial: str | None = None  # why `prompts` are only prefixes; None if they are complete
    media: tuple[PromptMedia, ...] = ()  # media items per prompt; empty if there are none

    def extras(self, block_tokens: int) -> Sequence[Sequence[bytes]]:
        """Return, per prompt and block, the hash inputs besides tokens; see `extras_of_prompt`."""
        if not self.media:
            return ((),) * len(self.prompts)
        return [
            extras_of_prompt(items, block_tokens, len(ids))
            for ids, items in zip(self.prompts, self.media, strict=True)
        ]

    def without_media(self) -> PromptTokens:
        """Return a copy whose prompts end at their first media item; the total is unchanged."""
        if not self.media:
            return self
        prompts = tuple(
            ids[: items[0].offset] if items else ids
            for ids, items in zip(self.prompts, self.media, strict=True)
        )
        return PromptTokens(prompts, self.total, self.degraded, MEDIA)


def known(prompts: tuple[TokenIds, ...]) -> PromptTokens:
    """Return the result for completely known prompts."""
    return PromptTokens(prompts, sum(map(len, prompts)))


def unknown(request: RouteRequest, reason: str) -> PromptTokens:
    """Return the result for a request whose prompts are unknown for this reason."""
    return PromptTokens((), request.body_bytes // _BYTES_PER_TOKEN, reason)


def read_fields(kind: RequestKind, body: bytes | bytearray) -> dict[str, Any]:
    """Decode the body of a known API; a chat's messages stay JSON text, most of which may be cached.

    Raises:
        msgspec.ValidationError: The body is not an object.
        ValueError, RecursionError: The body is not JSON.
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
    """Validate the decoded body of a known API and return its request.

    Raises:
        RequestError: 400: a field is invalid; names the field.
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


def unread_request(
    request_id: str,
    body_bytes: int,
    candidates: frozenset[str] | None,
    headers: Mapping[str, str],
    model: str | None = None,
) -> RouteRequest:
    """Return a request whose body is not read; it is routed by load."""
    return RouteRequest(request_id, RequestKind.PASSTHROUGH, model, {}, body_bytes, None, candidates, headers)


def too_large(limit_bytes: int) -> RequestError:
    """Return the error for a body above the limit."""
    return RequestError(413, f"the request body is larger than this router's limit of {limit_bytes} bytes")


def reads_cache(request: RouteRequest) -> bool:
    """Return whether engines look the prompt up in their prefix cache.

    Log probabilities of prompt tokens require computing the prompt. vLLM then skips its cache, and SGLang
    uses it only up to the first requested token; no cache hit is predicted for either.
    """
    if request.kind not in (RequestKind.CHAT, RequestKind.COMPLETIONS):
        return True
    body, sampling = request.body, _sampling(request.body)
    if isinstance(skips := sampling.get("skip_reading_prefix_cache"), bool):
        return not skips
    names = ((body, "prompt_logprobs"), (sampling, "prompt_logprobs"), (sampling, "prompt_logprob_token_ids"))
    if any(fields.get(name) is not None for fields, name in names):
        return False
    # SGLang's fields, which may request log probabilities of the prompt.
    start = body.get("logprob_start_len")
    if body.get("return_logprob") and isinstance(start, int) and start >= 0:
        return False
    if not body.get("echo"):
        return True
    # A chat without top_logprobs means 0, which requests the tokens' own log probabilities.
    if request.kind is RequestKind.CHAT:
        return body.get("top_logprobs", 0) is None
    return body.get("logprobs") is None


def sequences_of(request: RouteRequest, prompts: int, most: int) -> int:
    """Return how many sequences the engine decodes, at most `most`: the samples or beams of each prompt.

    If there are several, `cached_tokens` in the response's usage is not comparable with the predicted hit:
    vLLM reports one of them, which may hit blocks that another has just computed.
    """
    samples = 1
    for fields in (request.body, _sampling(request.body)):
        for name in _SAMPLES:
            number = fields.get(name)
            if type(number) is int and number > samples:
                samples = number
    return max(1, min(samples * prompts, most))


def _sampling(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sampling parameters of vLLM's /inference/v1/generate and SGLang's /generate."""
    sampling = body.get("sampling_params")
    return sampling if isinstance(sampling, dict) else {}


def session_of(request: RouteRequest) -> str | None:
    """Return the session id of a request: x-session-id, an agent's header, or OpenAI's `prompt_cache_key`.

    None without one, or if it is longer than 256 characters.
    """
    headers = request.headers
    named = headers.get(SESSION_ID_HEADER) or agent_session_id(headers)
    for session in (named, request.body.get("prompt_cache_key")):
        if isinstance(session, str) and 0 < len(session) <= _ID_CHARS_MAX:
            return session
    return None


def agent_session_id(headers: Mapping[str, str], names: Sequence[str] = AGENT_HEADERS) -> str | None:
    """Return the session id in the first of an agent's headers that is given; None without one."""
    return next((headers[name] for name in names if headers.get(name)), None)
