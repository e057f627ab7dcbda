"""An OpenAI request's prompt: a decoded JSON body in, token ids out, by the rules vLLM's server follows.

Both the router and the model server call this, so what the router predicts is what the engine sees. Knows
nothing of HTTP.
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
    ManyItemsError,
    MediaForm,
    chat_messages,
    chat_tools,
    decoded,
    items_of,
    objects,
)
from tokenization.encoder import TokenIds
from tokenization.errors import PromptError, PromptTooLongError, UnsupportedPromptError
from tokenization.images.prompts import ExpandedPrompt, expanded, image_parts
from tokenization.tokenizer import PromptTokenizer

Body = Mapping[str, Any]

# The API's default length of a completion.
_COMPLETION_OUTPUT_TOKENS = 16
# What a chat's body may say of how its images are read and processed.
_PROCESSING = ("mm_processor_kwargs", "media_io_kwargs")
# What vLLM's server takes for true or false as well.
_READ_AS_FLAGS = frozenset(
    {"0", "0.0", "off", "f", "false", "n", "no", "1", "1.0", "on", "t", "true", "y", "yes"}
)


class PromptLimits(msgspec.Struct, frozen=True):
    """Limits that the caller sets."""

    chars_max: int | None = None  # longer text is refused without the work of encoding it; None takes any
    context_tokens: int | None = None  # the model's, for requests that want to be cut to it; None: not known
    items_max: int | None = None  # of a chat's messages and parts, more are not rendered; None: any number is
    # Token ids that a prompt is given as are below it; None: below the tokenizer's vocabulary. A model's own
    # vocabulary may be greater, where its embeddings are padded.
    ids_below: int | None = None


NO_LIMITS = PromptLimits()


def completion_prompts(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> list[TokenIds]:
    """Token ids of every prompt of a /v1/completions body (`prompt`: text, ids, or a list of either).

    Raises:
        PromptError: A field has the wrong type, or an id is outside the vocabulary.
        PromptTooLongError: A text is longer than `limits.chars_max`.
        UnsupportedPromptError: The prompt is to be cut in a way that is not known, or has a suffix.
    """
    if body.get("suffix"):
        raise UnsupportedPromptError("where a suffix goes is the engine's own affair", "suffix")
    prompt = body.get("prompt")
    special = _flag(body, "add_special_tokens", True)
    output_tokens = _count(body, "max_tokens") if "max_tokens" in body else _COMPLETION_OUTPUT_TOKENS
    truncation = truncation_of(body, limits.context_tokens, output_tokens)
    if truncation is not WHOLE and not tokenizer.is_library_known:
        raise UnsupportedPromptError("which side mistral-common cuts is not known", "truncate_prompt_tokens")
    if isinstance(prompt, str):
        return [_encoded(prompt, tokenizer, "prompt", special, truncation, limits)]
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
    """Token ids of a /v1/chat/completions body.

    Args:
        body: Its `messages` may be JSON text still: those that are known from earlier requests need no check.

    Raises:
        PromptError: A field has the wrong type, or the template refuses the messages.
        MediaPromptError: A message holds an image, sound or film.
        PromptTooLongError: The rendered text is longer than `limits.chars_max`.
        UnsupportedPromptError: The request brings its own template, or the model has no chat template.
        ManyItemsError: There are more messages and parts than `limits.items_max`.
    """
    given = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    truncation = truncation_of(body, limits.context_tokens, _count(body, given))
    options = _template_options(body)
    special = _flag(body, "add_special_tokens", False)
    messages, template = body.get("messages"), tokenizer.template_for(options["tools"])
    if isinstance(messages, msgspec.Raw) and template is not None:
        known: Sequence[Mapping[str, Any]] = template.messages.checked(messages, limits.items_max)
    else:
        messages = decoded(messages)
        if limits.items_max is not None and items_of(messages) > limits.items_max:
            raise ManyItemsError
        known = chat_messages(messages, wants_parts=template is not None and template.wants_parts)
    text = tokenizer.render_chat(known, **options)
    return _encoded(text, tokenizer, "messages", special, truncation, limits)


def chat_prefix(body: Body, tokenizer: PromptTokenizer) -> TokenIds:
    """Token ids of what stands in front of a chat's first image, sound or film: they are the engine's own.

    Raises:
        PromptError: As for `chat_prompt`.
        UnsupportedPromptError: The prompt's beginning depends on its end.
    """
    # No text holds it by chance, so where it is first seen the first media part stands.
    mark = secrets.token_hex(16)
    rendered, special = _rendered_media(body, decoded(body.get("messages")), tokenizer, MediaForm(mark, mark))
    text = tokenizer.encoder.closed_prefix(rendered.partition(mark)[0])
    if special and tokenizer.encoder.affix_tokens[1]:
        raise UnsupportedPromptError("this model's prompts end with a special token", "add_special_tokens")
    return tokenizer.token_ids(text, add_special_tokens=special)


def image_chat(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> ExpandedPrompt | None:
    """A chat with images and what becomes of these; None where that is the engine's own affair.

    That is so for other media, models without a rule, texts with other places for images than the images',
    and where the request says how to process images.

    Raises:
        PromptError: As for `chat_prompt`.
    """
    rule = tokenizer.image_rule
    if rule is None or any(body.get(name) for name in _PROCESSING):
        return None
    messages = decoded(body.get("messages"))
    parts = image_parts(messages)
    if parts is None:
        return None
    text, special = _rendered_media(body, messages, tokenizer, MediaForm(rule.placeholder_text))
    _check_length(len(text), "messages", WHOLE, limits)
    return expanded(rule, tokenizer.token_ids(text, add_special_tokens=special), parts)


def _rendered_media(
    body: Body, messages: object, tokenizer: PromptTokenizer, media: MediaForm
) -> tuple[str, bool]:
    """The text of a chat with media, and whether special tokens are added to it."""
    if truncation_of(body, None, 0) is not WHOLE:
        raise UnsupportedPromptError("a prompt with media is not cut here", "truncate_prompt_tokens")
    options = _template_options(body)
    template = tokenizer.template_for(options["tools"])
    wants_parts = template is not None and template.wants_parts
    shown = chat_messages(messages, wants_parts=wants_parts, media=media)
    return tokenizer.render_chat(shown, **options), _flag(body, "add_special_tokens", False)


def _template_options(body: Body) -> dict[str, Any]:
    """What a request says of how its messages are to be rendered; arguments of `render_chat`."""
    if body.get("chat_template") is not None:
        raise UnsupportedPromptError("a chat template in the request is not accepted", "chat_template")
    kwargs = _template_kwargs(body)
    tools = _given_tools(kwargs.pop("tools", None))
    documents = kwargs.pop("documents", None) if body.get("documents") is None else body["documents"]
    if documents is not None:
        objects(documents, "documents")
    return {
        "tools": chat_tools(body.get("tools")) if tools is None else tools,
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": documents,
        "template_kwargs": kwargs,
    }


def _template_kwargs(body: Body) -> dict[str, Any]:
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise PromptError("chat_template_kwargs must be an object", "chat_template_kwargs")
    given = kwargs or {}
    # To vLLM's server these say that the template is to choose.
    kwargs = {name: value for name, value in given.items() if value not in (None, "auto")}
    if "chat_template" in kwargs:
        raise UnsupportedPromptError("a chat template in the request is not accepted", "chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise PromptError("reasoning_effort must be a string", "reasoning_effort")
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = effort != "none"
        kwargs["reasoning_effort"] = effort
    return kwargs


def _given_tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    """Tools among the template's variables, which go before the request's own, and reach it as they are."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnsupportedPromptError("the template's tools are no list of objects", "chat_template_kwargs")
    return tools


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
    if chars_max is not None and chars > chars_max and truncation is WHOLE:
        raise PromptTooLongError(chars, chars_max, param)


def _count(body: Body, name: str) -> int:
    """An answer's length; what is wrong with it is for the engine to say."""
    value = body.get(name)
    return value if type(value) is int and value > 0 else 0


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float) and str(value).lower() in _READ_AS_FLAGS:
        # Engines are not as strict.
        raise UnsupportedPromptError(f"{name} must be true or false", name)
    raise PromptError(f"{name} must be true or false", name)


def _checked_ids(ids: list[object], below: int) -> TokenIds:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < below:
            # Not shown: it may be anything, and nested too deeply to be shown.
            raise PromptError(f"token ids must be integers from 0 to {below - 1}", "prompt")
    return np.frombuffer(array("I", cast("list[int]", ids)), np.uint32)


_TRUNCATE = "truncate_prompt_tokens"
_TO_CONTEXT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens stay where `truncate_prompt_tokens` wants a prompt cut, as vLLM's server grants it."""

    tokens_max: int | None = None  # most tokens; None keeps all
    keeps_end: bool = True  # whether the last ones stay; else the first
    keeps_affixes: bool = True  # whether what post-processing adds stays in any case

    def apply(self, ids: TokenIds, head_tokens: int, tail_tokens: int) -> TokenIds:
        """Cuts a prompt of which so many tokens at either end come from post-processing.

        Raises:
            PromptError: What post-processing adds is alone longer than the limit.
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


WHOLE = Truncation()


def truncation_of(body: Mapping[str, Any], context_tokens: int | None, output_tokens: int) -> Truncation:
    """Reads the fields of a request.

    Args:
        context_tokens: The most that may be asked for; -1 leaves one of them to the answer. None: not known.
        output_tokens: The most that the answer may have; 0 where none is asked for.

    Raises:
        PromptError: A field has the wrong type or is out of range.
        UnsupportedPromptError: The prompt is to be cut to a context that is not known.
    """
    wanted = body.get(_TRUNCATE)
    if wanted is None:
        return WHOLE
    if type(wanted) is not int or wanted < _TO_CONTEXT:
        raise PromptError(f"{_TRUNCATE} must be a whole number of at least {_TO_CONTEXT}", _TRUNCATE)
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise PromptError("truncation_side must be left or right", "truncation_side")
    if context_tokens is None:
        if wanted == _TO_CONTEXT:
            raise UnsupportedPromptError("the model's context is not known", _TRUNCATE)
    elif wanted > context_tokens:
        raise PromptError(f"{_TRUNCATE} is more than the {context_tokens} tokens of the context", _TRUNCATE)
    elif wanted == _TO_CONTEXT:
        wanted = context_tokens - (1 if output_tokens else 0)
    return Truncation(wanted, keeps_end=side != "right", keeps_affixes=side is None)
