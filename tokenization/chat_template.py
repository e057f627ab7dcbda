"""A chat template: OpenAI messages in, the prompt's text out, as `transformers` would render it.

Knows Jinja and the conventions of Hugging Face chat templates; knows nothing of token ids or HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from tokenization.chat_messages import PlainMessage
from tokenization.developer_role import as_system, has_developer, names_developer
from tokenization.errors import PromptError, TokenizerLoadError, UnsupportedPromptError
from tokenization.loop_form import loop_form
from tokenization.loop_run import LoopRun, NotResumable, Rounds, Shown
from tokenization.part_loops import wants_parts
from tokenization.template_environment import ENVIRONMENT
from tokenization.turns import Later, Turns

Message = Mapping[str, Any]

_TRIPS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
# Stands behind a message that is left open; of what a template does to a text's end its space tells.
_OPEN_MARK = f"{secrets.token_hex(16)} "
# What the Messages API calls efforts to think.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class ChatTemplate:
    """One compiled template with the special tokens it may name.

    Args:
        source: The Jinja source, as in `chat_template.jinja` or tokenizer_config.json's `chat_template`.
        special_tokens: Variables such as `bos_token` and `eos_token`.

    Attributes:
        wants_parts: Whether it loops over a message's parts.
        has_turns: Whether it shows each message on its own.

    Raises:
        TokenizerLoadError: The source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = ENVIRONMENT.from_string(source)
            self.wants_parts = wants_parts(ENVIRONMENT.parse(source))
            self._turns = None if self.wants_parts else Turns.of(ENVIRONMENT, source)
            self.has_turns = self._turns is not None
            self._loop = loop_form(ENVIRONMENT, source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerLoadError(f"chat template, line {error.lineno}: {error.message}") from error
        # Every rendering copies them, and Jinja's chain of maps is slow to copy.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._names_developer = names_developer(source)

    @cached_property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` that stands for no thinking: "low" where "none" is refused or ignored.

        vLLM's server finds it in the same way, with one short prompt for every effort.
        """
        shown = self._probe("none")
        ignored = shown is None or any(self._probe(effort) == shown for effort in _EFFORTS)
        return "low" if ignored else "none"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: Message dicts whose `content` is a string, None, or (if `wants_parts`) text parts.
            tools: OpenAI tool definitions.
            add_generation_prompt: Whether to open the assistant's turn at the end.
            continue_final_message: Whether to leave the last message open, so that the model goes on with it.
            documents: Texts to answer from, for templates that show them.
            template_kwargs: Further variables of the template (`enable_thinking`, ...).

        Raises:
            PromptError: The template refuses these messages.
            UnsupportedPromptError: The message to be left open has no text.
        """
        if add_generation_prompt and continue_final_message:
            raise PromptError(
                "add_generation_prompt and continue_final_message cannot both be true",
                "continue_final_message",
            )
        if self.moves(messages):
            messages = as_system(messages)
        shown, last_text = _opened(messages) if continue_final_message else (messages, "")
        options = {**(template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        variables = {
            **self._special_tokens,
            **options,
            "messages": shown,
            "tools": tools,
            "documents": documents,
        }
        try:
            text = None
            if self._turns is not None and tools is None and documents is None and shown is messages:
                text = self._turns.render(variables, options)
            if text is None:
                text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise PromptError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except _TRIPS as error:
            # A template trusts its input's shape; whatever it trips over is the request's fault.
            raise PromptError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        return _left_open(text, last_text) if continue_final_message else text

    def moves(self, messages: Sequence[Message]) -> bool:
        """Whether messages are shown elsewhere than in their places, see `developer_role`."""
        return not self._names_developer and has_developer(messages)

    def later(
        self, first: Message, *, add_generation_prompt: bool, template_kwargs: Mapping[str, Any]
    ) -> Later | None:
        """How later messages of conversations that begin with `first` are shown; None where that varies."""
        if self._turns is None:
            return None
        options = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
        variables = {**self._special_tokens, **options, "tools": None, "documents": None}
        return self._turns.later(variables, options, first)

    def render_later(self, messages: Sequence[Message], shown: Later) -> str | None:
        """What stands in the place of messages behind the first; None where `render` has to be asked."""
        assert self._turns is not None
        if self.moves(messages):
            return None
        try:
            return self._turns.render_later(messages, shown)
        except (jinja2.TemplateError, *_TRIPS):
            return None

    def render_plain(self, messages: Sequence[PlainMessage], shown: Later) -> str | None:
        """As `render_later`, at less cost; None where that has to be asked."""
        assert self._turns is not None
        try:
            return self._turns.render_plain(messages, shown)
        except (jinja2.TemplateError, *_TRIPS):
            return None

    def resume(
        self, messages: Sequence[Message], known: Rounds | None, options: Mapping[str, Any]
    ) -> Shown | None:
        """Renders all but the rounds that are known; None where `render` has to be asked.

        Args:
            messages: All, those of the known rounds the very same objects.
            options: The other arguments of `render`.
        """
        if self._loop is None or options["continue_final_message"] or self.moves(messages):
            return None
        variables = {
            **self._special_tokens,
            **options["template_kwargs"],
            "add_generation_prompt": options["add_generation_prompt"],
            "messages": messages,
            "tools": options["tools"],
            "documents": options["documents"],
        }
        try:
            return LoopRun(self._loop, messages, known).show(variables)
        except (NotResumable, jinja2.TemplateError, *_TRIPS):
            return None

    def _probe(self, effort: str) -> str | None:
        """What a short prompt with this effort looks like; None where the template refuses it."""
        content = [{"type": "text", "text": "Hi"}] if self.wants_parts else "Hi"
        kwargs = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        try:
            return self.render([{"role": "user", "content": content}], template_kwargs=kwargs)
        except PromptError:
            return None


def _opened(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """The messages with the mark behind the last text of the last one, and this text."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _OPEN_MARK}], content
    parts = list(content) if isinstance(content, list) else []
    for at in reversed(range(len(parts))):
        if "text" in parts[at]:
            last_text = parts[at]["text"]
            parts[at] = {**parts[at], "text": last_text + _OPEN_MARK}
            return [*messages[:-1], {**last, "content": parts}], last_text
    raise UnsupportedPromptError("continue_final_message needs a last message with text", "messages")


def _left_open(text: str, last_text: str) -> str:
    """Cuts at the mark what the template puts behind the last message's content, which has to be there."""
    at = text.rfind(_OPEN_MARK.rstrip())
    if at < 0 or last_text.strip() not in text:
        raise PromptError(
            "the chat template does not show the last message as it is", "continue_final_message"
        )
    # A template that trims its messages has taken the mark's space, and would have taken the text's.
    return text[:at] if text.startswith(_OPEN_MARK, at) else text[:at].rstrip()
