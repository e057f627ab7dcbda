"""An OpenAI request's prompt: a decoded JSON body in, token ids out, by the rules vLLM's server follows.

Both the router and the model server call this, so what the router predicts is what the engine sees. Reading a
body and encoding its text are two steps: what is not remembered may take long. Knows nothing of HTTP.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from tokenization.chat_messages import MediaForm, chat_messages, decoded
from tokenization.chat_tools import chat_tools
from tokenization.conversations import Conversation
from tokenization.errors import PromptError, PromptTooLongError, UnsupportedPromptError
from tokenization.image_parts import image_parts
from tokenization.image_prompts import ImagePrompt
from tokenization.item_counts import ManyItemsError, items_of
from tokenization.message_ends import MessagesEnd
from tokenization.resumed import ResumedConversation
from tokenization.segment_memory import TokenIds
from tokenization.segments import Encoding
from tokenization.tokenizer import PromptTokenizer
from tokenization.truncation import WHOLE, Truncation, truncation_of

Body = Mapping[str, Any]

# The API's default length of a completion.
_COMPLETION_OUTPUT_TOKENS = 16
# What a chat's body may say of how its images are read and processed.
_PROCESSING = ("mm_processor_kwargs", "media_io_kwargs")
# What vLLM's server takes for true or false as well.
_READ_AS_FLAGS = frozenset(
    {"0", "0.0", "off", "f", "false", "n", "no", "1", "1.0", "on", "t", "true", "y", "yes"}
)
# What a chat's body may say, beside its messages, of how they become a prompt.
_CHAT_OPTIONS = frozenset(
    {
        *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "documents", "reasoning_effort", "tools", "truncate_prompt_tokens"),
    }
)
# Arguments of `render_chat` where it says nothing.
_PLAIN_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "documents": None,
        "template_kwargs": MappingProxyType({}),
    }
)


class PromptLimits(msgspec.Struct, frozen=True):
    """What the caller allows.

    Attributes:
        chars_max: Longer text is refused without the work of encoding it; None takes any.
        context_tokens: The model's context, for requests that want to be cut to it; None: not known.
        items_max: Of a chat that is not known, more messages and parts are not rendered; None: any number is.
        ids_below: Token ids that a prompt is given as are below it; None: below the tokenizer's vocabulary. A
            model's own vocabulary may be greater, where its embeddings are padded.
    """

    chars_max: int | None = None
    context_tokens: int | None = None
    items_max: int | None = None
    ids_below: int | None = None


NO_LIMITS = PromptLimits()


class PendingPrompt:
    """One prompt, checked and looked up, its text perhaps not encoded yet.

    Args:
        encoded: Told of a text when its ids are known.

    Attributes:
        missing_chars: Characters that `ids` has to encode.
    """

    __slots__ = ("_affix_tokens", "_encoded", "_source", "_truncation", "missing_chars")

    def __init__(
        self,
        source: Encoding | Conversation | ResumedConversation | TokenIds,
        truncation: Truncation = WHOLE,
        affix_tokens: tuple[int, int] = (0, 0),
        encoded: Callable[[Encoding], None] | None = None,
    ) -> None:
        self._source = source
        self._truncation = truncation
        self._affix_tokens = affix_tokens
        self._encoded = encoded
        self.missing_chars = 0 if isinstance(source, np.ndarray) else source.missing_chars

    def ids(self) -> TokenIds:
        """The prompt's token ids; the array may be shared, do not write to it."""
        source = self._source
        ids = source if isinstance(source, np.ndarray) else source.ids()
        if self._encoded is not None and isinstance(source, Encoding):
            self._encoded(source)
        if self._truncation is WHOLE:
            return ids
        return self._truncation.apply(ids, *self._affix_tokens)


def begin_completions(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> list[PendingPrompt]:
    """Every prompt of a /v1/completions body (`prompt`: text, ids, or a list of either).

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
        return [_begin(prompt, tokenizer, "prompt", special, truncation, limits)]
    if not isinstance(prompt, list) or not prompt:
        raise PromptError(
            "prompt must be a string, a list of token ids, or a non-empty list of these", "prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return [_begin(text, tokenizer, "prompt", special, truncation, limits) for text in prompt]
    lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    below = tokenizer.vocab_size if limits.ids_below is None else limits.ids_below
    return [PendingPrompt(_checked_ids(ids, below), truncation) for ids in lists]


def begin_chat(
    body: Body,
    tokenizer: PromptTokenizer,
    limits: PromptLimits = NO_LIMITS,
    message_ends: Sequence[MessagesEnd] = (),
) -> PendingPrompt:
    """The prompt of a /v1/chat/completions body; `messages` may be JSON text still, which is cheapest.

    Args:
        message_ends: Of this text, the longest first; none where they are not known.

    Raises:
        PromptError: `messages` or a template option has the wrong type, or the template refuses the messages.
        PromptTooLongError: The rendered text, tools included, is longer than `limits.chars_max`.
        UnsupportedPromptError: A message holds a part other than text, or the model has no chat template.
        ManyItemsError: There are more of them than `limits.items_max`, and they are not known.
    """
    options, special, truncation = _PLAIN_OPTIONS, False, WHOLE
    if not _CHAT_OPTIONS.isdisjoint(body):
        given = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        truncation = truncation_of(body, limits.context_tokens, _count(body, given))
        options = _template_options(body)
        special = _flag(body, "add_special_tokens", False) and tokenizer.affix_tokens != (0, 0)
    remember: Callable[[Encoding], None] | None = None
    messages, conversation = body.get("messages"), None
    if isinstance(messages, msgspec.Raw):
        conversation = tokenizer.conversation(messages, options, message_ends)
        if conversation is not None and conversation.begin(add_special_tokens=special):
            _check_length(conversation.chars, "messages", truncation, limits)
            return _pending(conversation, tokenizer, special, truncation)
    messages = decoded(messages)
    if limits.items_max is not None and items_of(messages) > limits.items_max:
        raise ManyItemsError
    known = chat_messages(messages, wants_parts=_wants_parts(tokenizer, options))
    text = None if conversation is None else conversation.render(known)
    if text is None:
        text = tokenizer.render_chat(known, **options)
    _check_length(len(text), "messages", truncation, limits)
    encoding = tokenizer.begin(text, add_special_tokens=special)
    template = tokenizer.chat_template
    if conversation is not None and template is not None and not template.moves(known):
        remember = conversation.remember
    return _pending(encoding, tokenizer, special, truncation, remember)


def completion_prompts(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> list[TokenIds]:
    """Token ids of every prompt of a /v1/completions body; as `begin_completions`, encoded at once."""
    return [prompt.ids() for prompt in begin_completions(body, tokenizer, limits)]


def chat_prompt(body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS) -> TokenIds:
    """Token ids of a /v1/chat/completions body; as `begin_chat`, encoded at once."""
    return begin_chat(body, tokenizer, limits).ids()


def chat_prefix(body: Body, tokenizer: PromptTokenizer) -> PendingPrompt:
    """What stands in front of a chat's first image, sound or film: its ids are the engine's own.

    Raises:
        PromptError: As for `begin_chat`.
        UnsupportedPromptError: The prompt's beginning depends on its end.
    """
    # No text holds it by chance, so where it is first seen the first media part stands.
    mark = secrets.token_hex(16)
    rendered, special = _rendered_media(body, decoded(body.get("messages")), tokenizer, MediaForm(mark, mark))
    text = tokenizer.closed_prefix(rendered.partition(mark)[0])
    if special and tokenizer.affix_tokens[1]:
        raise UnsupportedPromptError("this model's prompts end with a special token", "add_special_tokens")
    return PendingPrompt(tokenizer.begin(text, add_special_tokens=special))


def begin_image_chat(
    body: Body, tokenizer: PromptTokenizer, limits: PromptLimits = NO_LIMITS
) -> ImagePrompt | None:
    """A chat with images; None where what becomes of these is the engine's own affair.

    That is so for other media, models without a rule, and where the request says how to process images.

    Raises:
        PromptError: As for `begin_chat`.
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
    return ImagePrompt(rule, tokenizer.begin(text, add_special_tokens=special), parts)


def _rendered_media(
    body: Body, messages: object, tokenizer: PromptTokenizer, media: MediaForm
) -> tuple[str, bool]:
    """The text of a chat with media, and whether special tokens are added to it."""
    if truncation_of(body, None, 0) is not WHOLE:
        raise UnsupportedPromptError("a prompt with media is not cut here", "truncate_prompt_tokens")
    options = _template_options(body)
    shown = chat_messages(messages, wants_parts=_wants_parts(tokenizer, options), media=media)
    return tokenizer.render_chat(shown, **options), _flag(body, "add_special_tokens", False)


def _template_options(body: Body) -> dict[str, Any]:
    """What a request says of how its messages are to be rendered; arguments of `render_chat`."""
    if body.get("chat_template") is not None:
        raise UnsupportedPromptError("a chat template in the request is not accepted", "chat_template")
    kwargs = _template_kwargs(body)
    tools = _given_tools(kwargs.pop("tools", None))
    documents = kwargs.pop("documents", None) if body.get("documents") is None else body["documents"]
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
    ):
        raise PromptError("documents must be a list of objects", "documents")
    return {
        "tools": chat_tools(body.get("tools")) if tools is None else tools,
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": documents,
        "template_kwargs": kwargs,
    }


def _wants_parts(tokenizer: PromptTokenizer, options: Mapping[str, Any]) -> bool:
    template = tokenizer.template_for(options["tools"])
    return template is not None and template.wants_parts


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


def _begin(
    text: str,
    tokenizer: PromptTokenizer,
    param: str,
    special: bool,
    truncation: Truncation,
    limits: PromptLimits,
) -> PendingPrompt:
    _check_length(len(text), param, truncation, limits)
    encoding = tokenizer.begin(text, add_special_tokens=special)
    return _pending(encoding, tokenizer, special, truncation)


def _check_length(chars: int, param: str, truncation: Truncation, limits: PromptLimits) -> None:
    chars_max = limits.chars_max
    if chars_max is not None and chars > chars_max and truncation is WHOLE:
        raise PromptTooLongError(chars, chars_max, param)


def _pending(
    source: Encoding | Conversation | ResumedConversation,
    tokenizer: PromptTokenizer,
    special: bool,
    truncation: Truncation,
    encoded: Callable[[Encoding], None] | None = None,
) -> PendingPrompt:
    affix_tokens = tokenizer.affix_tokens if special else (0, 0)
    return PendingPrompt(source, truncation, affix_tokens, encoded)


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
