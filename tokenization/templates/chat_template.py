"""A chat template: OpenAI messages in, the prompt's text out, as `transformers` would render it.

Checked messages are remembered by their JSON text: a conversation's next turn sends most of them again, and
to check and decode a message costs more than to look it up, above all one with calls of tools. Knows Jinja
and the conventions of Hugging Face chat templates; knows nothing of token ids or HTTP.
"""

from __future__ import annotations

import math
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
import msgspec

from tokenization.apis.chat import ManyItemsError, checked_message, items_of
from tokenization.errors import PromptError, TokenizerLoadError, UnsupportedPromptError
from tokenization.templates.environment import ENVIRONMENT, WHILE, wants_parts, while_set, without_idle_rounds

_CAPACITY_BYTES = 32 << 20
_RAW_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY_BYTES = 300


class _Checked(NamedTuple):
    message: dict[str, Any]
    items: int


class MessageMemory:
    """Remembers messages of chats with one template; safe to share between threads.

    Args:
        capacity_bytes: Most memory in use. When it is reached, all messages are forgotten.
    """

    def __init__(self, *, wants_parts: bool, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._wants_parts = wants_parts
        self._capacity_bytes = capacity_bytes
        self._known: dict[bytes, _Checked] = {}
        self.used_bytes = 0
        self._lock = threading.Lock()

    def checked(self, text: msgspec.Raw, items_max: int | None = None) -> list[Mapping[str, Any]]:
        """Check messages that are JSON text; they are shared, do not write to them.

        Args:
            items_max: Of more messages and parts nothing is made; None: any number is checked.

        Raises:
            PromptError: As `chat_messages`.
            ManyItemsError: There are more than `items_max`.
        """
        messages: list[Mapping[str, Any]] = []
        items_left = math.inf if items_max is None else items_max
        try:
            raws = _RAW_MESSAGES.decode(text)
            for at, raw in enumerate(raws):
                key = bytes(raw)
                if (known := self._known.get(key)) is None:
                    known = self._check(raw, at, items_left)
                    self._put(key, known)
                items_left -= known.items
                if items_left < 0:
                    raise ManyItemsError
                messages.append(known.message)
        except (ValueError, RecursionError):
            messages = []  # it is no JSON, or no list
        if not messages:
            raise PromptError("messages must be a non-empty list", "messages")
        return messages

    def _check(self, raw: msgspec.Raw, at: int, items_left: float) -> _Checked:
        message = msgspec.json.decode(raw)
        items = items_of([message])
        if items > items_left:
            raise ManyItemsError
        return _Checked(checked_message(message, at, wants_parts=self._wants_parts), items)

    def _put(self, key: bytes, checked: _Checked) -> None:
        size_bytes = _ENTRY_BYTES + sys.getsizeof(key) + _decoded_bytes(checked.message)
        if size_bytes > self._capacity_bytes // 2:
            return
        with self._lock:
            if self.used_bytes + size_bytes > self._capacity_bytes:
                self._known, self.used_bytes = {}, 0
            if key not in self._known:
                self._known[key] = checked
                self.used_bytes += size_bytes


def _decoded_bytes(value: Any) -> int:
    """Memory of decoded JSON, at most: what occurs in it twice counts twice."""
    size_bytes = 0
    pending = [value]
    while pending:
        item = pending.pop()
        size_bytes += sys.getsizeof(item)
        if isinstance(item, dict):
            size_bytes += sum(map(sys.getsizeof, item))
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return size_bytes


Message = Mapping[str, Any]

_TRIPS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
# Stands behind a message that is left open; of what a template does to a text's end its space tells.
_OPEN_MARK = f"{secrets.token_hex(16)} "
# What the Messages API calls efforts to think.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_DEVELOPER, _SYSTEM = "developer", "system"


class ChatTemplate:
    """One compiled template with the special tokens it may name.

    Raises:
        TokenizerLoadError: The source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            syntax = ENVIRONMENT.parse(source)
            self.wants_parts = wants_parts(syntax)  # whether it loops over a message's parts
            self._template = ENVIRONMENT.from_string(without_idle_rounds(syntax))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerLoadError(f"chat template, line {error.lineno}: {error.message}") from error
        # Every rendering copies them, and Jinja's chain of maps is slow to copy.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        # Engines look for the role in quotes.
        self._names_developer = '"developer"' in source or "'developer'" in source
        self.messages = MessageMemory(wants_parts=self.wants_parts)

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
            add_generation_prompt: Whether to open the assistant's turn at the end.
            continue_final_message: Whether to leave the last message open, so that the model goes on with it.

        Raises:
            PromptError: The template refuses these messages.
            UnsupportedPromptError: The message to be left open has no text.
        """
        if add_generation_prompt and continue_final_message:
            raise PromptError(
                "add_generation_prompt and continue_final_message cannot both be true",
                "continue_final_message",
            )
        if not self._names_developer and _DEVELOPER in [message["role"] for message in messages]:
            messages = _as_system(messages)
        shown, last_text = _opened(messages) if continue_final_message else (messages, "")
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "messages": shown,
            "tools": tools,
            "documents": documents,
            WHILE: while_set,
        }
        try:
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


def _as_system(messages: Sequence[Message]) -> list[Message]:
    """Messages for a template that does not know the role `developer`, as vLLM's server turns them.

    Every developer's message becomes the system's, and all of the system's become one, in front.
    """
    turned = [_turned(message) for message in messages]
    system = [message for message in turned if message["role"] == _SYSTEM]
    if system == turned[:1]:
        return turned
    texts = [text for message in system if (text := _text(message.get("content")))]
    others = [message for message in turned if message["role"] != _SYSTEM]
    return [{"role": _SYSTEM, "content": "\n\n".join(texts)}, *others]


def _turned(message: Message) -> Message:
    if message["role"] != _DEVELOPER:
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": _SYSTEM}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join([part["text"] for part in content if "text" in part])
    return content if isinstance(content, str) else ""
