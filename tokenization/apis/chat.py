"""Chat completions: check messages and tools and convert them to the form in which templates get them.

The form is that of vLLM's server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec

from tokenization.errors import MediaPromptError, PromptError, UnsupportedPromptError

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")
# Part type -> name in templates.
_MEDIA_TYPES = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
# Known fields of parts; vLLM 0.32 passes all others on to templates that take parts.
_PART_FIELDS = frozenset(
    {
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    }
)
# Fields that identify unsupported parts without a type.
_UNTYPED_FIELDS = ("prompt_embeds", "tool_reference")
# Billing line that a client adds to the system message; it changes with every request.
BILLING = "x-anthropic-billing-header"
_SHOWN_CHARS = 64
_KINDS: dict[type, str] = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
_Value = TypeVar("_Value")

Body = Mapping[str, Any]
"""JSON object of a request."""

ITEMS_AT_ONCE_MAX = 500
"""Maximum of messages and parts that are rendered in a few milliseconds.

Templates take about 20 us per message, however short, so a body of 1 MB may take a second.
"""


class ManyItemsError(Exception):
    """There are more messages and parts than the caller renders at once; the request itself is valid."""


class MediaForm(NamedTuple):
    """Texts that represent images, audio and video in rendered messages."""

    text: str  # added before a message's text per item if the template takes no parts; may be empty
    mark: str = ""  # text part before each item if the template takes parts; may be empty


def decoded(messages: object) -> object:
    """Decode messages that are JSON text; return others unchanged, and None for invalid JSON."""
    if not isinstance(messages, msgspec.Raw):
        return messages
    try:
        return msgspec.json.decode(messages)
    except (ValueError, RecursionError):
        return None


def chat_messages(
    messages: object, *, wants_parts: bool, media: MediaForm | None = None
) -> list[dict[str, Any]]:
    """Check OpenAI messages and convert them to the form that chat templates expect.

    Text parts are joined by line feeds unless the template takes parts. Arguments of tool calls are decoded
    from JSON.

    Args:
        media: Texts for images, audio and video; None rejects messages with media.

    Raises:
        PromptError: A message is invalid; the error names it.
        MediaPromptError: A message contains media, and `media` is None.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a non-empty list", "messages")
    return [
        checked_message(message, at, wants_parts=wants_parts, media=media)
        for at, message in enumerate(messages)
    ]


def checked_message(
    message: object, at: int, *, wants_parts: bool, media: MediaForm | None = None
) -> dict[str, Any]:
    """Check and convert the message at place `at` of the list, see `chat_messages`."""
    return _simple_message(message, wants_parts) or _message(message, f"messages[{at}]", wants_parts, media)


def count_items(messages: object) -> int:
    """Count messages, their parts and their tool calls, before they are checked."""
    if not isinstance(messages, list):
        return 0
    return len(messages) + sum(map(_inner_items, messages))


def medium_of(part: object) -> str | None:
    """Return the name in templates of an image, audio or video part, or None for other parts."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None:
        # Engines then use the field's name.
        kind = next((name for name in part if name in _MEDIA_TYPES), None)
    return _MEDIA_TYPES.get(kind) if isinstance(kind, str) else None


def _simple_message(message: object, wants_parts: bool) -> dict[str, Any] | None:
    """Convert a message of a role and a text, the most common form, faster than `_message`; else None."""
    if type(message) is not dict or len(message) != 2:
        return None
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str:
        return None
    if role == "developer" or (role == "system" and content.startswith(BILLING)):
        return None
    if wants_parts and role != "tool":
        return {"role": role, "content": [{"type": "text", "text": content}]}
    return {"role": role, "content": content}


def _message(message: object, where: str, wants_parts: bool, media: MediaForm | None) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise PromptError(f"{where} must be an object with a role", where)
    content = message.get("content")
    if role == "system":
        content = _without_billing(content)
    content = _content(content, where, wants_parts, media)
    if role == "tool" and isinstance(content, list) and all(part["type"] == "text" for part in content):
        # Tool results are strings, also for templates that take parts.
        content = "\n".join([part["text"] for part in content])
    known: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        # Without empty lists, which would select a template's branch for tools.
        if calls := message.get("tool_calls"):
            known["tool_calls"] = tool_calls(calls, f"{where}.tool_calls")
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            known["reasoning"] = known["reasoning_content"] = reasoning
    elif role == "tool":
        # Null counts as missing.
        if (call_id := message.get("tool_call_id")) is not None:
            known["tool_call_id"] = call_id
    elif role == "developer":
        known["tools"] = developer_tools(message.get("tools"))
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            known[name] = message[name]
    return known


def _content(content: object, where: str, wants_parts: bool, media: MediaForm | None) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    if content is None:
        return [] if wants_parts else ""
    if not isinstance(content, list):
        raise PromptError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    where = f"{where}.content"
    parts: list[dict[str, Any]] = []
    placeholders: list[str] = []
    for at, part in enumerate(content):
        if (medium := medium_of(part)) is not None:
            if media is None:
                raise MediaPromptError(f"{where}[{at}]: media parts are not supported here", where)
            placeholders.append(media.text)
            if media.mark and wants_parts:
                parts.append({"type": "text", "text": media.mark})
            parts.append({"type": medium, **_extra_fields(part, wants_parts)})
        elif (text := _part_text(part, f"{where}[{at}]")) is not None:
            parts.append({"type": "text", "text": text, **_extra_fields(part, wants_parts)})
    if wants_parts:
        return parts
    # Engines add the placeholders of media before the message's text.
    return "\n".join(filter(None, [*placeholders, *(part.get("text") for part in parts)]))


def _extra_fields(part: object, wants_parts: bool) -> Mapping[str, Any]:
    """Return the unknown fields of a part."""
    if not wants_parts or not isinstance(part, dict) or part.keys() <= _PART_FIELDS:
        return {}
    return {name: value for name, value in part.items() if name not in _PART_FIELDS}


def _without_billing(content: object) -> object:
    """Remove the client's billing line from the beginning of a system message's texts."""
    if isinstance(content, str):
        return (content.partition("\n")[2] or None) if content.startswith(BILLING) else content
    if not isinstance(content, list):
        return content
    kept: list[object] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str) or not text.startswith(BILLING):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append({**part, "text": rest} if is_text else rest)
    return kept


def _part_text(part: object, where: str) -> str | None:
    """Return a text part's text, or None for a part without text, which engines skip."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise PromptError(f"{where} must be an object with a type", where)
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _UNTYPED_FIELDS if name in part), None)
    if not isinstance(kind, str):
        raise PromptError(f"{where} must be an object with a type", where)
    if kind not in _TEXT_TYPES:
        raise UnsupportedPromptError(
            f"{where}: parts of type {kind[:_SHOWN_CHARS]!r} are not supported", where
        )
    name = kind if kind in ("refusal", "thinking") else "text"
    text = part.get(name)
    if text is None and name in part and kind in ("text", "refusal"):
        return None
    return typed(text, str, f"{where}.{name}", where)


def _inner_items(message: Any) -> int:
    if type(message) is not dict:
        return 0
    lists = [value for name in ("content", "tool_calls") if isinstance(value := message.get(name), list)]
    # Tool results of other APIs contain parts.
    inner = [part.get("content") for part in chain.from_iterable(lists) if type(part) is dict]
    return sum(map(len, lists)) + sum([len(parts) for parts in inner if type(parts) is list])


class OrderedCalls(list[Any]):
    """Tool calls whose fields are already in vLLM's order, which differs from that of a chat's calls."""


def chat_tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    """Check tool definitions; missing fields become null, fields unknown to vLLM are dropped.

    Raises:
        PromptError: `tools` is not a list of functions.
    """
    if tools is None or tools == []:
        return None
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(objects(tools, "tools"))]


def objects(value: object, where: str, param: str | None = None) -> list[dict[str, Any]]:
    """Return a value that must be a list of objects; errors name `param`, by default `where`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptError(f"{where} must be a list of objects", param or where)
    return value


def typed(value: object, kind: type[_Value], where: str, param: str | None = None) -> _Value:
    """Return a value that must be of a JSON type; errors name `param`, by default `where`."""
    if not isinstance(value, kind):
        raise PromptError(f"{where} must be {_KINDS[kind]}", param or where)
    return value


def optional(value: object, kind: type[_Value], where: str, param: str | None = None) -> _Value | None:
    """Return a value that must be null or of a JSON type, see `typed`."""
    return None if value is None else typed(value, kind, where, param)


def developer_tools(tools: object) -> object:
    """Return the tools of a developer message with their fields in vLLM's order."""
    if not isinstance(tools, list):
        return tools
    return [_ordered_tool(tool) if isinstance(tool, dict) else tool for tool in tools]


def tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Check an assistant's tool calls and decode their arguments from JSON."""
    known = []
    for at, call in enumerate(typed(calls, list, where)):
        function = call.get("function") if isinstance(call, dict) else None
        function = typed(function, dict, f"{where}[{at}].function", where)
        arguments = _arguments(function.get("arguments"), where)
        called = {**function, "arguments": arguments}
        if not isinstance(calls, OrderedCalls):
            called = _ordered(called, ("arguments", "name"))
        known.append(_ordered({**call, "function": called}, ("id", "function", "type")))
    return known


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where}.function must be an object with a name", "tools")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    shown = {"type": "function", "function": known}
    deferred, own = tool.get("defer_loading"), function.get("defer_loading")
    # Optional fields that are kept; others are dropped.
    optional = {"strict": function.get("strict"), "defer_loading": deferred if own is None else own}
    known |= {name: value for name, value in optional.items() if value is not None}
    return shown if deferred is None else {**shown, "defer_loading": deferred}


def _ordered_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, dict):
        tool = {**tool, "function": _ordered(function, ("name", "description", "parameters", "strict"))}
    return _ordered(tool, ("function", "type"))


def _ordered(fields: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """Return the fields with the named ones first."""
    return {name: fields[name] for name in first if name in fields} | fields


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    """Return a call's arguments as an object; invalid ones count as empty, as in engines."""
    if isinstance(arguments, str):
        escapes = "\\u" in arguments
        try:
            arguments = json.loads(arguments)
            if escapes:
                # The body is UTF-8, but escapes in the arguments may encode lone surrogates.
                json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            # Unsupported rather than invalid: engines fail only if the template uses the arguments.
            raise UnsupportedPromptError(f"{where} contains a lone surrogate", where) from error
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
