"""OpenAI request bodies with validation, and the API's errors.

Unknown fields are ignored; unsupported fields that would change the answer are rejected.
``tokenization.prompts`` validates the prompt itself.
"""

import re
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from model_server.errors import EngineClosedError, QueueFullError, RequestError
from tokenization import PromptError

_MESSAGE_CHARS_MAX = 1000

# Error types that differ from the status phrase.
_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
}

Body: TypeAlias = dict[str, Any]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Digits = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]

Api = Literal["completion", "chat"]
_LOGPROBS_MAX = 20  # as vLLM's --max-logprobs
_TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]

# Accepted values of unsupported fields: those that have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "prompt_logprobs": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "prompt_embeds": (),
    # Tool calls are not parsed from the answer, so they cannot be required.
    "tool_choice": ("none", "auto"),
}

_T = TypeVar("_T")


class ApiError(Exception):
    """Error response to a request."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param  # field at fault, or None
        # Truncated, because it may quote the request.
        self.message = message if len(message) <= _MESSAGE_CHARS_MAX else f"{message[:_MESSAGE_CHARS_MAX]}..."

    def body(self) -> bytes:
        """Return the JSON body, which is also the payload of a stream's error event."""
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase.title().replace(" ", "") + "Error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def from_exception(error: PromptError | RequestError) -> ApiError:
    """Return the API error for a prompt error or a rejection by the engine."""
    if isinstance(error, QueueFullError | EngineClosedError):
        return ApiError(503, str(error))
    return ApiError(400, str(error), error.param)


class StreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct):
    """Field `json_schema` of a response format."""

    name: str | None = None
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """Structured output in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Structured output in vLLM's form; exactly one field is set."""

    json: str | dict[str, Any] | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    json_object: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields common to /v1/completions and /v1/chat/completions; None: not given."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] | None = None
    stop_token_ids: _TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: Annotated[dict[_Digits, _Bias], Meta(max_length=1024)] | None = None
    allowed_token_ids: _TokenIds | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: _Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: str | None = None
    request_id: _Name | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def echoes(self) -> bool:
        """Return whether the answer repeats the prompt first."""
        return False

    @property
    def logprob_count(self) -> int | None:
        """Number of alternatives per token; None: no log probabilities."""
        return None


class CompletionBody(GenerationBody, kw_only=True):
    """Body of /v1/completions without the prompt."""

    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=_LOGPROBS_MAX)] | bool | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def logprob_count(self) -> int | None:
        return None if self.logprobs is None or self.logprobs is False else int(self.logprobs)


class ChatBody(GenerationBody, kw_only=True):
    """Body of /v1/chat/completions without the messages."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=_LOGPROBS_MAX)] | None = None

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


_BODIES: dict[Api, type[GenerationBody]] = {"completion": CompletionBody, "chat": ChatBody}


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /tokenize without prompt or messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


class UnloadAdapterBody(msgspec.Struct):
    """Body of /v1/unload_lora_adapter."""

    lora_name: _Text


class LoadAdapterBody(UnloadAdapterBody):
    """Body of /v1/load_lora_adapter."""

    lora_path: _Text


# Prepares the types for `msgspec.convert`, see CONTRIBUTING.md.
for _kind in (*_BODIES.values(), TokenizeBody, DetokenizeBody, LoadAdapterBody, UnloadAdapterBody):
    msgspec.json.Decoder(_kind)


def decode_body(raw: bytes) -> Body:
    """Decode a JSON object; raises an ApiError for anything else."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the request body must be a JSON object")
    return body


def convert(body: Body, kind: type[_T]) -> _T:
    """Validate types and ranges of the fields of `kind`; raises an ApiError with the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error


def generation_body(api: Api, body: Body) -> GenerationBody:
    """Validate a generation's body without its prompt; raises an ApiError with the field."""
    fields = convert(body, _BODIES[api])
    _refuse_unsupported(body)
    if isinstance(fields, ChatBody) and fields.top_logprobs and not fields.logprobs:
        raise ApiError(400, "when using `top_logprobs`, `logprobs` must be set to true", "top_logprobs")
    if fields.echoes and fields.logprob_count is not None:
        raise ApiError(400, "echo with logprobs is not supported by this server yet; leave one out", "echo")
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options is only allowed with stream set to true", "stream_options")
    return fields


def _refuse_unsupported(body: Body) -> None:
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        # Compare types too: False == 0 in Python, but 0 may differ from false in the API.
        if value is not None and (type(value), value) not in [(type(known), known) for known in neutral]:
            raise ApiError(400, f"{name} is not supported by this server yet; leave it out", name)


def _wrong_field(message: str) -> ApiError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.max_tokens`" into an error that names the field."""
    found = re.fullmatch(r"(?P<what>.*) - at `(?:key` in `)?\$\.?(?P<path>.*)`", message, re.DOTALL)
    if found is None:
        return ApiError(400, message)
    what, path = found["what"], found["path"]
    return ApiError(400, f"{path}: {what[:1].lower()}{what[1:]}", re.split(r"[.\[]", path)[0] or None)
