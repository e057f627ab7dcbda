"""Conversion of OpenAI requests to engine requests: fields, token ids, sampling parameters, grammars.

It runs on a worker thread, because encoding a long prompt is slow. llguidance implements structured outputs.
"""

import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model_server.model.lora import LoraRegistry
from model_server.openai.types import (
    Api,
    ApiError,
    Body,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    convert,
    decode_body,
    from_exception,
    generation_body,
)
from model_server.requests import EngineCoreRequest, SamplingParams
from tokenization import (
    PromptError,
    PromptLimits,
    PromptTokenizer,
    PromptTooLongError,
    chat_prompt,
    completion_prompts,
)

# Whitespace in JSON outputs, bounded because a model could otherwise generate spaces up to max_tokens.
_JSON_WHITESPACE = r"[ \n\t]{1,8}"
_COMPLETION_MAX_TOKENS_DEFAULT = 16
_CHOICES_MAX = 1024
# Sampling parameters with the same name and meaning as body fields.
_COPIED = (
    *("temperature", "top_p", "min_p", "min_tokens", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_ID_PREFIXES = {"completion": "cmpl", "chat": "chatcmpl"}


@dataclass(frozen=True, eq=False)
class ServedModel:
    """Served model with its names, limits and adapters."""

    names: tuple[str, ...]  # served names, the main one first
    root: str  # path, or name of the built-in model
    tokenizer: PromptTokenizer
    max_model_len: int  # maximum of prompt and output tokens
    vocab_size: int  # embedding rows; may exceed the tokenizer's ids
    adapters: LoraRegistry

    @cached_property
    def grammar_tokens(self) -> LLTokenizer:
        """Tokenizer of structured outputs, created when first needed: a large vocabulary takes seconds."""
        return LLTokenizer(self.tokenizer.to_json(), eos_token=sorted(self.tokenizer.eos_token_ids))

    @property
    def ids_below(self) -> int:
        """Upper bound (exclusive) of valid token ids."""
        return max(self.tokenizer.vocab_size, self.vocab_size)

    def served_name(self, name: str | None) -> str:
        """Return the model name of the response; raises an ApiError 404 for an unknown model."""
        if name is None:
            return self.names[0]
        if name not in self.names and self.adapter_of(name) is None:
            raise ApiError(404, f"the model {name!r} does not exist; see /v1/models", "model")
        return name

    def adapter_of(self, name: str) -> str | None:
        """Return the name if it is that of a loaded adapter, else None."""
        return name if name not in self.names and name in self.adapters.loaded() else None


def _constraint(model: ServedModel, fields: GenerationBody) -> LLMatcher | None:
    """Compile the structured output of a request, or return None; raises an ApiError if it is invalid."""
    formatted = fields.response_format
    param = None if fields.structured_outputs is None else "structured_outputs"
    if formatted is not None and formatted.type != "text":
        if param is not None:
            raise ApiError(400, "give response_format or structured_outputs, not both", param)
        param = "response_format"
    if param is None:
        return None
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(fields, name):
            raise ApiError(400, f"{name} cannot be combined with {param}; leave one out", name)
    try:
        matcher = LLMatcher(model.grammar_tokens, _grammar(fields), log_level=0)
    except ValueError as error:  # invalid JSON, or a lone surrogate
        raise ApiError(400, f"{param} is invalid: {error}", param) from error
    if matcher.is_error():
        raise ApiError(400, f"{param} is invalid: {matcher.get_error()}", param)
    return matcher


def _grammar(fields: GenerationBody) -> str:
    outputs, formatted = fields.structured_outputs, fields.response_format
    if outputs is None:
        assert formatted is not None
        if formatted.type == "json_object":
            return _json_grammar({"type": "object"})
        if formatted.json_schema is None or formatted.json_schema.schema is None:
            raise ApiError(400, "response_format json_schema needs json_schema.schema", "response_format")
        return _json_grammar(formatted.json_schema.schema)
    if (
        sum(bool(option) for option in (outputs.json, outputs.regex, outputs.choice, outputs.json_object))
        != 1
    ):
        message = "structured_outputs needs exactly one of json, regex, choice and json_object"
        raise ApiError(400, message, "structured_outputs")
    if outputs.regex:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return _json_grammar(outputs.json or {"type": "object"})


def _json_grammar(schema: dict[str, Any] | str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_WHITESPACE})


@dataclass(frozen=True, slots=True)
class Job:
    """Validated HTTP request with its engine requests."""

    api: Api  # completion or chat
    request_id: str  # id in the response
    model: str  # model name in the response
    fields: GenerationBody  # validated body
    prompts: tuple[tuple[int, ...], ...]  # token ids per prompt (a chat has one)
    requests: tuple[EngineCoreRequest, ...]  # per choice: `n` for each prompt, in order
    echoed: tuple[str, ...]  # echoed prompt per choice


def prepare(model: ServedModel, api: Api, raw: bytes, header_id: str | None) -> Job:
    """Validate and encode the request of a JSON body.

    Args:
        header_id: Request id of the header, which takes precedence over that of the body.

    Raises:
        ApiError: The request is malformed, for another model, or exceeds the context.
    """
    body = decode_body(raw)
    fields = generation_body(api, body)
    name = model.served_name(fields.model)
    copies = fields.n or 1
    if _prompt_count(api, body) * copies > _CHOICES_MAX:
        raise ApiError(
            400, f"at most {_CHOICES_MAX} choices per request: use fewer prompts or a smaller n", "n"
        )
    prompts = tuple(map(tuple, _encoded(model, api, body)))
    cut = body.get("truncate_prompt_tokens") is not None
    if not all(prompts):
        raise ApiError(400, "the prompt has no tokens", "messages" if api == "chat" else "prompt")
    constraint = _constraint(model, fields)
    shown_id = header_id or fields.request_id or secrets.token_hex(8)
    # Engine ids must be unique, even if a client reuses its id concurrently.
    own_id = f"{shown_id}-{secrets.token_hex(8)}"
    requests = tuple(
        EngineCoreRequest(
            request_id=f"{own_id}-{at * copies + copy}",
            prompt_token_ids=prompt,
            sampling=_sampling(fields, _answer_tokens(model, api, fields, len(prompt), cut), copy),
            cache_salt=fields.cache_salt,
            lora_name=model.adapter_of(name),
            priority=fields.priority or 0,
            constraint=None if constraint is None else constraint.deep_copy(),
        )
        for at, prompt in enumerate(prompts)
        for copy in range(copies)
    )
    # The echo is the decoded prompt, after truncation and with special tokens. As in vLLM, there is no echo
    # if token ids are returned.
    shows_text = fields.echoes and not fields.return_token_ids
    texts = [model.tokenizer.decode(prompt) if shows_text else "" for prompt in prompts]
    echoed = tuple(text for text in texts for _ in range(copies))
    request_id = f"{_ID_PREFIXES[api]}-{shown_id}"
    return Job(api, request_id, model=name, fields=fields, prompts=prompts, requests=requests, echoed=echoed)


def tokenize(model: ServedModel, raw: bytes) -> dict[str, object]:
    """Return the answer to a /tokenize request with `prompt` or `messages`; raises an ApiError."""
    body = decode_body(raw)
    fields = convert(body, TokenizeBody)
    model.served_name(fields.model)
    if "messages" not in body and not isinstance(body.get("prompt"), str):
        raise ApiError(400, "prompt must be a string (or give messages)", "prompt")
    ids = _encoded(model, "chat" if "messages" in body else "completion", body)[0]
    texts = [model.tokenizer.token_text(token_id) for token_id in ids] if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": texts}


def render(model: ServedModel, api: Api, raw: bytes) -> object:
    """Return the answer to a render request: the token ids of its prompts; raises an ApiError."""
    body = decode_body(raw)
    fields = generation_body(api, body)
    model.served_name(fields.model)
    shown_id = fields.request_id or secrets.token_hex(8)
    rendered = [
        {"request_id": f"{_ID_PREFIXES[api]}-{shown_id}", "token_ids": ids}
        for ids in _encoded(model, api, body)
    ]
    return rendered[0] if api == "chat" else rendered


def detokenize(model: ServedModel, raw: bytes) -> dict[str, object]:
    """Return the answer to a /detokenize request; raises an ApiError."""
    fields = convert(decode_body(raw), DetokenizeBody)
    model.served_name(fields.model)
    if any(token_id >= model.ids_below for token_id in fields.tokens):
        raise ApiError(400, f"token ids must be less than {model.ids_below}", "tokens")
    return {"prompt": model.tokenizer.decode(fields.tokens, skip_special_tokens=False)}


def _prompt_count(api: Api, body: Body) -> int:
    """Return the number of prompts of a body, without encoding them."""
    prompt = body.get("prompt")
    if api == "chat" or not isinstance(prompt, list) or isinstance(next(iter(prompt), 0), int):
        return 1
    return len(prompt)


def _encoded(model: ServedModel, api: Api, body: Body) -> list[list[int]]:
    # The longest token bounds the text length, so a far too long text is rejected without encoding it.
    chars_max = model.max_model_len * model.tokenizer.token_chars_max - 1
    limits = PromptLimits(chars_max, model.max_model_len, ids_below=model.ids_below)
    try:
        if api == "chat":
            return [chat_prompt(body, model.tokenizer, limits).tolist()]
        return [ids.tolist() for ids in completion_prompts(body, model.tokenizer, limits)]
    except PromptTooLongError as error:
        raise _too_long(model, f"at least {error.chars // model.tokenizer.token_chars_max}") from error
    except PromptError as error:
        raise from_exception(error) from error


def _answer_tokens(
    model: ServedModel, api: Api, fields: GenerationBody, prompt_tokens: int, cut: bool
) -> int:
    """Return the maximum of output tokens; after a truncated prompt, at most the remaining context."""
    room = model.max_model_len - prompt_tokens
    wanted = (fields.max_completion_tokens if api == "chat" else None) or fields.max_tokens
    if room < 1 or (wanted is not None and wanted > room and not cut):
        raise _too_long(model, str(prompt_tokens), wanted)
    if wanted is not None:
        return min(wanted, room)
    return room if api == "chat" else min(room, _COMPLETION_MAX_TOKENS_DEFAULT)


def _too_long(model: ServedModel, prompt_tokens: str, wanted: int | None = None) -> ApiError:
    asked = f" and {wanted} tokens of output were requested" if wanted is not None else ""
    return ApiError(
        400,
        f"This model's maximum context length is {model.max_model_len} tokens. However, your prompt contains "
        f"{prompt_tokens} input tokens{asked}. Shorten the prompt or ask for fewer output tokens.",
        "input_tokens",
    )


def _sampling(fields: GenerationBody, max_tokens: int, copy: int) -> SamplingParams:
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
    copied = {name: value for name in _COPIED if (value := getattr(fields, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        top_k=max(0, fields.top_k or 0),
        # Choices of one prompt must differ reproducibly.
        seed=None if fields.seed is None else fields.seed ^ copy,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
        allowed_token_ids=None if fields.allowed_token_ids is None else frozenset(fields.allowed_token_ids),
        logprobs=fields.logprob_count,
        **copied,
    )
