"""The OpenAI request bodies: JSON bytes in, checked fields out.

Types and ranges are checked here once; unknown fields are ignored, known ones that would change the answer
and are not supported are refused. The prompt itself is left to ``tokenization.openai_prompts``.
"""

import re
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from model_server.api_errors import ApiError

Body: TypeAlias = dict[str, Any]

_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]

# What each known but unsupported field may hold: the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tool_choice": ("none", "auto"),
}


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that /v1/completions and /v1/chat/completions share; None means not given."""

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
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: _Name | None = None
    user: str | None = None
    request_id: _Name | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end generation."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize, beside the prompt or messages."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize."""

    tokens: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None


_T = TypeVar("_T")


def decode_body(raw: bytes) -> Body:
    """Decode a JSON object.

    Raises:
        ApiError: 400, it is not one.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the request body must be a JSON object")
    return body


def convert(body: Body, kind: type[_T]) -> _T:
    """Check the types and ranges of the fields that `kind` knows.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error


def generation_body(body: Body) -> GenerationBody:
    """Check the fields of a completion or chat completion body, except its prompt.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = convert(body, GenerationBody)
    _refuse_unsupported(body)
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options is only allowed with stream set to true", "stream_options")
    return fields


def _refuse_unsupported(body: Body) -> None:
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        # Compared with its type: in Python False equals 0, but logprobs 0 does ask for log probabilities.
        if value is not None and (type(value), value) not in [(type(known), known) for known in neutral]:
            raise ApiError(400, f"{name} is not supported by this server yet; leave it out", name)


def _wrong_field(message: str) -> ApiError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.max_tokens`" into an error that names the field."""
    found = re.fullmatch(r"(?P<what>.*) - at `\$\.?(?P<path>.*)`", message, re.DOTALL)
    if found is None:
        return ApiError(400, message)
    what, path = found["what"], found["path"]
    return ApiError(400, f"{path}: {what[:1].lower()}{what[1:]}", re.split(r"[.\[]", path)[0] or None)
