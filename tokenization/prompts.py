"""Prompts of OpenAI requests: decoded JSON body to token ids, by the rules of vLLM's server.

The router and the model server share this code, so that the router's token ids are those of the engine.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from tokenization.apis.chat import (
    Body,
    ManyItemsError,
    MediaForm,
    chat_messages,
    chat_tools,
    count_items,
    decoded,
    objects,
    typed,
)
from tokenization.encoder import TokenIds
from tokenization.errors import PromptError, PromptTooLongError, UnsupportedPromptError
from tokenization.images.prompts import ExpandedPrompt, expand_images, image_parts
from tokenization.tokenizer import PromptTokenizer

# Default of `max_tokens` in the completions API.
_COMPLETION_OUTPUT_TOKENS = 16
# Fields of a chat that change how its images are loaded and processed.
_PROCESSING = ("mm_processor_kwargs", "media_io_kwargs")
# Values that vLLM's server accepts as booleans as well.
_LENIENT_FLAGS = frozenset(
    {"0", "0.0", "off", "f", "false", "n", "no", "1", "1.0", "on", "t", "true", "y", "yes"}
)


class PromptLimits(msgspec.Struct, frozen=True):
    """Limits set by the caller."""

    chars_max: int | None = None  # longer texts are rejected before they are encoded; None: no limit
    context_tokens: int | None = None  # the model's context, for truncation to it; None: unknown
    items_max: int | None = None  # maximum of a chat's messages and parts; None: no limit
    # Exclusive maximum of token ids in a prompt; None: size of the tokenizer's vocabulary. The model's own
    # vocabulary may be larger if its embeddings are padded.
    ids_below: int | None = None


NO_LIMITS = PromptLimits()


def completion_prompts(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> list[TokenIds]:
    """Return the token ids of each prompt of a /v1/completions body.

    Args:
        body: Its `prompt` is a text, a list of token ids, or a list of either.

    Raises:
        PromptError: A field has the wrong type, or an id is outside the vocabulary.
        PromptTooLongError: A text is longer than `limits.chars_max`.
        UnsupportedPromptError: The truncation is not supported, or there is a suffix.
    """
    if body.get("suffix"):
        raise UnsupportedPromptError("suffix: its place in the prompt depends on the engine", "suffix")
    prompt = body.get("prompt")
    special = _flag(body, "add_special_tokens", True)
    output_tokens = _count(body, "max_tokens") if "max_tokens" in body else _COMPLETION_OUTPUT_TOKENS
    truncation = truncation_of(body, limits.context_tokens, output_tokens)
    if truncation is not NO_TRUNCATION and not tokenizer.uses_tokenizer_json:
        raise UnsupportedPromptError("truncation is not supported with mistral-common", _TRUNCATE)
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise PromptError(
            "prompt must be a string, a list of token ids, or a non-empty list of these", "prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return [_encoded(text, tokenizer, "prompt", special, truncation, limits) for text in prompt]
    lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    below = tokenizer.vocab_size if limits.ids_below is None else limits.ids_below
    return [truncation.apply(_checked_ids(ids, below), 0, 0) for ids in lists]


def chat_prompt(body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS) -> TokenIds:
    """Return the token ids of a /v1/chat/completions body.

    Args:
        body: Its `messages` may be `msgspec.Raw` JSON, which saves checking messages of earlier requests.

    Raises:
        PromptError: A field has the wrong type, or the template rejects the messages.
        MediaPromptError: A message contains an image, audio or video.
        PromptTooLongError: The rendered text is longer than `limits.chars_max`.
        UnsupportedPromptError: The request has its own template, or the model has no chat template.
        ManyItemsError: There are more messages and parts than `limits.items_max`.
    """
    if tokenizer.coded is not None:
        body = {**body, "messages": decoded(body.get("messages"))}
        if limits.items_max is not None and count_items(body["messages"]) > limits.items_max:
            raise ManyItemsError
        return tokenizer.coded.chat(body)
    given = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    truncation = truncation_of(body, limits.context_tokens, _count(body, given))
    options = _template_options(body)
    special = _flag(body, "add_special_tokens", False)
    messages, template = body.get("messages"), tokenizer.template_for(options["tools"])
    if isinstance(messages, msgspec.Raw) and template is not None:
        known: Sequence[Mapping[str, Any]] = template.messages.checked(messages, limits.items_max)
    else:
        messages = decoded(messages)
        if limits.items_max is not None and count_items(messages) > limits.items_max:
            raise ManyItemsError
        known = chat_messages(messages, wants_parts=template is not None and template.wants_parts)
    text = tokenizer.render_chat(known, **options)
    return _encoded(text, tokenizer, "messages", special, truncation, limits)


def chat_prefix(body: Body, tokenizer: PromptTokenizer) -> TokenIds:
    """Return the token ids of a chat before its first image, audio or video.

    Raises:
        PromptError: See `chat_prompt`.
        UnsupportedPromptError: The prompt's beginning depends on its end.
    """
    # Random, so that its first occurrence in the text is the first media part.
    mark = secrets.token_hex(16)
    rendered, special = _rendered_media(body, decoded(body.get("messages")), tokenizer, MediaForm(mark, mark))
    text = tokenizer.encoder.stable_prefix(rendered.partition(mark)[0])
    if special and tokenizer.encoder.affix_tokens[1]:
        raise UnsupportedPromptError("this model's prompts end with a special token", "add_special_tokens")
    return tokenizer.token_ids(text, add_special_tokens=special)


def image_chat(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> ExpandedPrompt | None:
    """Return a chat's token ids with its images expanded, or None if the expansion is unknown.

    It is unknown for other media, for models without a rule, if the numbers of images and of placeholders
    differ, and if the request has options for processing images.

    Raises:
        PromptError: See `chat_prompt`.
    """
    rule = tokenizer.image_rule
    if rule is None or any(body.get(name) for name in _PROCESSING):
        return None
    messages = decoded(body.get("messages"))
    parts = image_parts(messages)
    if parts is None:
        return None
    text, special = _rendered_media(body, messages, tokenizer, MediaForm(rule.placeholder_text))
    _check_length(len(text), "messages", NO_TRUNCATION, limits)
    return expand_images(rule, tokenizer.token_ids(text, add_special_tokens=special), parts)


def _rendered_media(
    body: Body, messages: object, tokenizer: PromptTokenizer, media: MediaForm
) -> tuple[str, bool]:
    """Render a chat with media; return the text and whether special tokens are added."""
    if truncation_of(body, None, 0) is not NO_TRUNCATION:
        raise UnsupportedPromptError("prompts with media cannot be truncated", "truncate_prompt_tokens")
    options = _template_options(body)
    template = tokenizer.template_for(options["tools"])
    wants_parts = template is not None and template.wants_parts
    shown = chat_messages(messages, wants_parts=wants_parts, media=media)
    return tokenizer.render_chat(shown, **options), _flag(body, "add_special_tokens", False)


def _template_options(body: Body) -> dict[str, Any]:
    """Return the arguments of `render_chat` that a request sets."""
    if body.get("chat_template") is not None:
        raise UnsupportedPromptError("a chat template in the request is not accepted", "chat_template")
    kwargs = _template_kwargs(body)
    # Tools of `chat_template_kwargs` replace the request's tools and are not checked.
    tools = kwargs.pop("tools", None)
    if tools is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UnsupportedPromptError(
                "the template's tools are not a list of objects", "chat_template_kwargs"
            )
    elif body.get("tools") is not None:
        tools = chat_tools(body["tools"])
    documents = kwargs.pop("documents", None) if body.get("documents") is None else body["documents"]
    if documents is not None:
        objects(documents, "documents")
    return {
        "tools": tools,
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": documents,
        "template_kwargs": kwargs,
    }


def _template_kwargs(body: Body) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    given = {} if given is None else typed(given, dict, "chat_template_kwargs")
    # vLLM's server leaves these values to the template.
    kwargs = {name: value for name, value in given.items() if value not in (None, "auto")}
    if "chat_template" in kwargs:
        raise UnsupportedPromptError("a chat template in the request is not accepted", "chat_template_kwargs")
    if (effort := body.get("reasoning_effort")) is not None:
        kwargs["reasoning_effort"] = typed(effort, str, "reasoning_effort")
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = effort != "none"
    return kwargs


def _encoded(
    text: str,
    tokenizer: PromptTokenizer,
    param: str,
    special: bool,
    truncation: Truncation,
    limits: PromptLimits,
) -> TokenIds:
    _check_length(len(text), param, truncation, limits)
    ids = tokenizer.token_ids(text, add_special_tokens=special)
    return truncation.apply(ids, *(tokenizer.encoder.affix_tokens if special else (0, 0)))


def _check_length(chars: int, param: str, truncation: Truncation, limits: PromptLimits) -> None:
    chars_max = limits.chars_max
    if chars_max is not None and chars > chars_max and truncation is NO_TRUNCATION:
        raise PromptTooLongError(chars, chars_max, param)


def _count(body: Body, name: str) -> int:
    """Return a field's positive integer, or 0; the engine rejects invalid values."""
    value = body.get(name)
    return value if type(value) is int and value > 0 else 0


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float) and str(value).lower() in _LENIENT_FLAGS:
        # Unsupported rather than invalid, because engines accept these values.
        raise UnsupportedPromptError(f"{name} must be true or false", name)
    raise PromptError(f"{name} must be true or false", name)


def _checked_ids(ids: list[object], below: int) -> TokenIds:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < below:
            # The message does not show the value, which may be too deeply nested.
            raise PromptError(f"token ids must be integers from 0 to {below - 1}", "prompt")
    return np.frombuffer(array("I", cast("list[int]", ids)), np.uint32)


_TRUNCATE = "truncate_prompt_tokens"
_WHOLE_CONTEXT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """Truncation by `truncate_prompt_tokens`, as in vLLM's server."""

    tokens_max: int | None = None  # maximum of tokens; None: no truncation
    keeps_end: bool = True  # whether to keep the last tokens; else the first
    keeps_affixes: bool = True  # whether to always keep the tokens that post-processing adds

    def apply(self, ids: TokenIds, head_tokens: int, tail_tokens: int) -> TokenIds:
        """Truncate a prompt, whose first and last tokens may come from post-processing.

        Raises:
            PromptError: The tokens of post-processing alone exceed the limit.
        """
        if self.tokens_max is None or len(ids) <= self.tokens_max:
            return ids
        if not self.keeps_affixes or self.tokens_max == 0:
            head_tokens = tail_tokens = 0
        room = self.tokens_max - head_tokens - tail_tokens
        if room < 0:
            raise PromptError(
                f"{_TRUNCATE} leaves no room for the {head_tokens + tail_tokens} special tokens", _TRUNCATE
            )
        end = len(ids) - tail_tokens
        kept = ids[end - room : end] if self.keeps_end else ids[head_tokens : head_tokens + room]
        return np.concatenate((ids[:head_tokens], kept, ids[end:]))


NO_TRUNCATION = Truncation()


def truncation_of(body: Body, context_tokens: int | None, output_tokens: int) -> Truncation:
    """Return the truncation that a request asks for.

    Args:
        context_tokens: Length of the model's context, which a request selects by -1; None: unknown.
        output_tokens: Maximum of generated tokens; unless it is 0, -1 leaves room for one of them.

    Raises:
        PromptError: A field has the wrong type or is out of range.
        UnsupportedPromptError: The request selects a context of unknown length.
    """
    wanted = body.get(_TRUNCATE)
    if wanted is None:
        return NO_TRUNCATION
    if type(wanted) is not int or wanted < _WHOLE_CONTEXT:
        raise PromptError(f"{_TRUNCATE} must be an integer of at least {_WHOLE_CONTEXT}", _TRUNCATE)
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise PromptError("truncation_side must be left or right", "truncation_side")
    if context_tokens is None:
        if wanted == _WHOLE_CONTEXT:
            raise UnsupportedPromptError("the model's context length is unknown", _TRUNCATE)
    elif wanted > context_tokens:
        raise PromptError(f"{_TRUNCATE} is more than the {context_tokens} tokens of the context", _TRUNCATE)
    elif wanted == _WHOLE_CONTEXT:
        wanted = context_tokens - (1 if output_tokens else 0)
    return Truncation(wanted, keeps_end=side != "right", keeps_affixes=side is None)
