"""Chat template: renders OpenAI messages to the prompt's text, as `transformers` does.

The sandbox is that of transformers, with fast paths for frequent operations: a message's fields, attributes
of loops and namespaces, methods of strings.

Checked messages are cached by their JSON text. The next turn of a conversation repeats most of them, and
checking and decoding a message costs more than a lookup, above all with tool calls.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import takewhile
from types import BuiltinMethodType
from typing import Any

import jinja2
import msgspec
from cachetools import LRUCache, cached
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenization.apis.chat import ManyItemsError, checked_message, count_items
from tokenization.errors import PromptError, TokenizerLoadError, UnsupportedPromptError
from tokenization.templates.analysis import WHILE, wants_parts, with_loop_exits

_CAPACITY_BYTES = 32 << 20
_RAW_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
_ENTRY_BYTES = 300


_Checked = tuple[dict[str, Any], int]  # message, and the number of its items


class MessageCache:
    """Cache of checked messages of chats with one template; emptied at its capacity. Thread-safe."""

    def __init__(self, *, wants_parts: bool, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._wants_parts = wants_parts
        self._capacity_bytes = capacity_bytes
        self._known: dict[bytes, _Checked] = {}
        self.used_bytes = 0
        self._lock = threading.Lock()

    def checked(self, text: msgspec.Raw, items_max: int | None = None) -> list[Mapping[str, Any]]:
        """Return the checked messages of a JSON text; they are shared and must not be modified.

        Args:
            items_max: Maximum of messages and parts; None: no limit.

        Raises:
            PromptError: See `chat_messages`.
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
                message, items = known
                items_left -= items
                if items_left < 0:
                    raise ManyItemsError
                messages.append(message)
        except (ValueError, RecursionError):
            messages = []  # not JSON, or not a list
        if not messages:
            raise PromptError("messages must be a non-empty list", "messages")
        return messages

    def _check(self, raw: msgspec.Raw, at: int, items_left: float) -> _Checked:
        message = msgspec.json.decode(raw)
        items = count_items([message])
        if items > items_left:
            raise ManyItemsError
        return checked_message(message, at, wants_parts=self._wants_parts), items

    def _put(self, key: bytes, checked: _Checked) -> None:
        size_bytes = _ENTRY_BYTES + sys.getsizeof(key) + _decoded_bytes(checked[0])
        if size_bytes > self._capacity_bytes // 2:
            return
        with self._lock:
            if self.used_bytes + size_bytes > self._capacity_bytes:
                self._known, self.used_bytes = {}, 0
            if key not in self._known:
                self._known[key] = checked
                self.used_bytes += size_bytes


def _decoded_bytes(value: Any) -> int:
    """Return an upper bound of decoded JSON's memory in bytes; shared objects count repeatedly."""
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

_RENDER_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
# Marks the end of a message that the model continues. Its space shows whether the template trims texts.
_OPEN_MARK = f"{secrets.token_hex(16)} "
# Values of `effort` in the Messages API.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_DEVELOPER, _SYSTEM = "developer", "system"


class ChatTemplate:
    """Compiled template with the special tokens that it may use.

    Raises:
        TokenizerLoadError: The source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            syntax = ENVIRONMENT.parse(source)
            self.wants_parts = wants_parts(syntax)  # whether it loops over a message's parts
            self._template = ENVIRONMENT.from_string(with_loop_exits(syntax))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerLoadError(f"chat template, line {error.lineno}: {error.message}") from error
        # A plain dict, because every rendering copies the globals, and a ChainMap is slow to copy.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        # vLLM searches for the quoted role, too.
        self._names_developer = '"developer"' in source or "'developer'" in source
        self.messages = MessageCache(wants_parts=self.wants_parts)

    @cached_property
    def effort_without_thinking(self) -> str:
        """Return the `reasoning_effort` without thinking: "low" if the template rejects or ignores "none".

        As in vLLM's server, one short prompt per effort is rendered.
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
        """Render a conversation.

        Args:
            messages: Message dicts whose `content` is a string, None, or (if `wants_parts`) text parts.
            add_generation_prompt: Whether to start the assistant's turn at the end.
            continue_final_message: Whether to end within the last message, so that the model continues it.

        Raises:
            PromptError: The template rejects these messages.
            UnsupportedPromptError: The message to be continued has no text.
        """
        if add_generation_prompt and continue_final_message:
            raise PromptError(
                "add_generation_prompt and continue_final_message cannot both be true",
                "continue_final_message",
            )
        if not self._names_developer and _DEVELOPER in [message["role"] for message in messages]:
            messages = _as_system(messages)
        shown, last_text = _marked(messages) if continue_final_message else (messages, "")
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
                f"the model's chat template rejects these messages: {error}", "messages"
            ) from error
        except _RENDER_ERRORS as error:
            # Templates rely on the messages' structure, so any such error is the request's fault.
            raise PromptError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        return _cut_at_mark(text, last_text) if continue_final_message else text

    def _probe(self, effort: str) -> str | None:
        """Render a short prompt with this effort; return None if the template rejects it."""
        content = [{"type": "text", "text": "Hi"}] if self.wants_parts else "Hi"
        kwargs = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        try:
            return self.render([{"role": "user", "content": content}], template_kwargs=kwargs)
        except PromptError:
            return None


def _marked(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Return the messages with a mark after the last text, and this text."""
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


def _cut_at_mark(text: str, last_text: str) -> str:
    """Cut the text at the mark after the last message's content; raise if the content was changed."""
    at = text.rfind(_OPEN_MARK.rstrip())
    if at < 0 or last_text.strip() not in text:
        raise PromptError("the chat template changes the text of the last message", "continue_final_message")
    # If the template removed the mark's space, it trims messages and would also trim this text.
    return text[:at] if text.startswith(_OPEN_MARK, at) else text[:at].rstrip()


def _as_system(messages: Sequence[Message]) -> list[Message]:
    """Convert messages for a template without the role `developer`, as vLLM's server does.

    Developer messages become system messages, and all system messages are joined to one at the beginning.
    """
    renamed = [_system_message(message) for message in messages]
    system = [message for message in renamed if message["role"] == _SYSTEM]
    if system == renamed[:1]:
        return renamed
    texts = [text for message in system if (text := _text(message.get("content")))]
    others = [message for message in renamed if message["role"] != _SYSTEM]
    return [{"role": _SYSTEM, "content": "\n\n".join(texts)}, *others]


def _system_message(message: Message) -> Message:
    if message["role"] != _DEVELOPER:
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": _SYSTEM}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join([part["text"] for part in content if "text" in part])
    return content if isinstance(content, str) else ""


def while_set(items: Iterable[Any], namespace: Any, flag: str) -> Iterable[Any]:
    """Return an iterator of the items that ends when the namespace's flag is cleared."""
    if type(namespace) is not Namespace:
        return items
    return takewhile(lambda _: getattr(namespace, flag, True), items)


_DICT_ATTRIBUTES = frozenset(dir(dict))
# Methods that change nothing and format nothing, which the sandbox allows unwrapped.
_DICT_METHODS = frozenset({"get", "items", "keys", "values"})
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_ATTRIBUTES = frozenset(
    {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
)
# Values of other types may be functions, which the sandbox must check.
_VALUES = frozenset({str, int, float, bool, list, dict, type(None)})
# Arguments that Jinja passes to functions with context.
_CONTEXT_ARGUMENTS = ("_block_vars", "_loop_vars")
_INDENTED_CHARS_MAX = 2 << 20


class _Generation(Extension):
    """Extension for `{% generation %}`, which marks model output for training; renders the block's body."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox with fast paths for types that are known to be safe."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`; for a dict without such an attribute, the item."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                return obj[attribute] if attribute in obj else _missing(attribute)
            if attribute in _DICT_METHODS:
                return getattr(obj, attribute)
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, Namespace)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function; a method of a string or dict is called without context."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) in (str, dict):
            for name in _CONTEXT_ARGUMENTS:
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


@lru_cache(maxsize=256)
def _missing(name: str) -> jinja2.Undefined:
    """Return the undefined value of a missing field; cached, because most messages lack the same fields."""
    return ENVIRONMENT.undefined(obj={}, name=name)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    plain = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    return _indented(plain, ensure_ascii, indent, separators)


# Cached, because json is ten times slower with indents and a client's tools are always the same.
@cached(LRUCache(_INDENTED_CHARS_MAX, getsizeof=len), lock=threading.Lock())
def _indented(plain: str, ensure_ascii: bool, indent: int, separators: tuple[str, str] | None) -> str:
    return json.dumps(json.loads(plain), ensure_ascii=ensure_ascii, indent=indent, separators=separators)


# Of all templates, with the whitespace options of transformers.
ENVIRONMENT = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
ENVIRONMENT.filters["tojson"] = _tojson
ENVIRONMENT.globals["raise_exception"] = _raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
