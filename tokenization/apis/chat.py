"""OpenAI messages and tools, checked and brought into the form that vLLM's server hands to chat templates.

Decoded JSON in, dicts for the template out. Knows no templates, tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from tokenization.errors import MediaPromptError, PromptError, UnsupportedPromptError

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")
# Part type -> what a template calls it.
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
# Of parts; vLLM 0.32 hands all others on to templates that take parts.
_PART_FIELDS = frozenset(
    {
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    }
)
# Parts that are known by such a field where they have no type, but have no form here.
_UNTYPED_FIELDS = ("prompt_embeds", "tool_reference")
# A client adds it to the system's text for its bill; it changes with every request.
BILLING = "x-anthropic-billing-header"
_SHOWN_CHARS = 64
# Fields of a message that are lists.
_LISTS = ("content", "tool_calls")

ITEMS_AT_ONCE_MAX = 500
"""Messages and their parts that are read and rendered in some milliseconds.

Templates take some 20 us for a message, however short, so a body of 1 MB may take them a second.
"""


class ManyItemsError(Exception):
    """Messages have more parts than are to be rendered at once; it is no fault of theirs."""


class MediaForm(NamedTuple):
    """How messages with images, sounds and films are shown."""

    text: str  # in front of a text for each of them, where the template takes no parts; empty: nothing
    mark: str = ""  # text in front of each of them, where it takes parts; empty: none


def decoded(messages: object) -> object:
    """Messages that are still JSON text, decoded; others as they are. None for what is no JSON."""
    if not isinstance(messages, msgspec.Raw):
        return messages
    try:
        return msgspec.json.decode(messages)
    except (ValueError, RecursionError):
        return None


def chat_messages(
    messages: object, *, wants_parts: bool, media: MediaForm | None = None
) -> list[dict[str, Any]]:
    """Checks OpenAI messages and brings them into the form chat templates expect.

    Text parts are joined by line feeds unless the template loops over parts; the JSON text of tool calls'
    arguments becomes an object.

    Args:
        media: How images, sounds and films are shown; None refuses messages that hold one.

    Raises:
        PromptError: Naming the message that is wrong.
        MediaPromptError: A message holds a part other than text, and `media` is None.
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
    """The message at a place of the list; as `chat_messages`."""
    return _plain(message, wants_parts) or _message(message, f"messages[{at}]", wants_parts, media)


def items_of(messages: object) -> int:
    """Messages, their parts and their calls; also of what is not checked yet."""
    if not isinstance(messages, list):
        return 0
    return len(messages) + sum(map(_inner_items, messages))


def medium_of(part: object) -> str | None:
    """What a template calls an image, sound or film; None for any other part."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None:
        # Engines then go by the field that holds it.
        kind = next((name for name in part if name in _MEDIA_TYPES), None)
    return _MEDIA_TYPES.get(kind) if isinstance(kind, str) else None


def _plain(message: object, wants_parts: bool) -> dict[str, Any] | None:
    """The most common message, a role and a text: the same as `_message` makes of it, at less cost."""
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
        # A tool's answer is a string to every template.
        content = "\n".join([part["text"] for part in content])
    known: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        # An empty list would put a template on its tool path.
        if calls := message.get("tool_calls"):
            known["tool_calls"] = tool_calls(calls, f"{where}.tool_calls")
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            known["reasoning"] = known["reasoning_content"] = reasoning
    elif role == "tool":
        # Null is as good as none.
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
    in_front: list[str] = []
    for at, part in enumerate(content):
        if (medium := medium_of(part)) is not None:
            if media is None:
                raise MediaPromptError(f"{where}[{at}]: media parts have no token ids here", where)
            in_front.append(media.text)
            if media.mark and wants_parts:
                parts.append({"type": "text", "text": media.mark})
            parts.append({"type": medium, **_extra_fields(part, wants_parts)})
        elif (text := _part_text(part, f"{where}[{at}]")) is not None:
            parts.append({"type": "text", "text": text, **_extra_fields(part, wants_parts)})
    if wants_parts:
        return parts
    # Engines put the places of media in front of the message's text.
    return "\n".join(filter(None, [*in_front, *(part.get("text") for part in parts)]))


def _extra_fields(part: object, wants_parts: bool) -> Mapping[str, Any]:
    """What a part has beside the fields that are known."""
    if not wants_parts or not isinstance(part, dict) or part.keys() <= _PART_FIELDS:
        return {}
    return {name: value for name, value in part.items() if name not in _PART_FIELDS}


def _without_billing(content: object) -> object:
    """A system's content, of which each text that begins with the client's billing has lost that line."""
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
    """A text part's text; None for one that has none, which engines skip."""
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
    if not isinstance(text, str):
        raise PromptError(f"{where}.{name} must be a string", where)
    return text


def _inner_items(message: Any) -> int:
    if type(message) is not dict:
        return 0
    lists = [value for name in _LISTS if isinstance(value := message.get(name), list)]
    # Another API's results have parts of their own.
    inner = [part.get("content") for part in chain.from_iterable(lists) if type(part) is dict]
    return sum(map(len, lists)) + sum([len(parts) for parts in inner if type(parts) is list])


_CALL_FIELDS = ("id", "function", "type")
_CALLED_FIELDS = ("arguments", "name")
_OWN_TOOL_FIELDS = ("function", "type")
_OWN_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
# Shown where they are given; a tool's other fields are dropped.
_OPTIONAL_FIELDS = ("strict", "defer_loading")


class CallsInOrder(list[Any]):
    """Calls whose fields stand as vLLM shows them, where that is not the order of a chat's calls."""


def chat_tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    """Checks tool definitions: what is not given is there as null, what vLLM does not know is gone.

    Raises:
        PromptError: `tools` is no list of functions.
    """
    if tools is None or tools == []:
        return None
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(objects(tools, "tools"))]


def objects(value: object, where: str, param: str | None = None) -> list[dict[str, Any]]:
    """The list of objects that a value has to be; `param` names the request's field, if not `where`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise PromptError(f"{where} must be a list of objects", param or where)
    return value


def developer_tools(tools: object) -> object:
    """The tools in a developer's message, of which only the order of fields is changed."""
    if not isinstance(tools, list):
        return tools
    return [_own_tool(tool) if isinstance(tool, dict) else tool for tool in tools]


def tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Checks an assistant's calls; the JSON text of their arguments becomes an object."""
    if not isinstance(calls, list):
        raise PromptError(f"{where} must be a list", where)
    known = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise PromptError(f"{where}[{at}].function must be an object", where)
        arguments = _arguments(function.get("arguments"), where)
        called = {**function, "arguments": arguments}
        if not isinstance(calls, CallsInOrder):
            called = _ordered(called, _CALLED_FIELDS)
        known.append(_ordered({**call, "function": called}, _CALL_FIELDS))
    return known


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where}.function must be an object with a name", "tools")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    shown = {"type": "function", "function": known}
    deferred = tool.get("defer_loading")
    for name in _OPTIONAL_FIELDS:
        value = function.get(name)
        if value is None and name == "defer_loading":
            value = deferred
        if value is not None:
            known[name] = value
    return shown if deferred is None else {**shown, "defer_loading": deferred}


def _own_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, dict):
        tool = {**tool, "function": _ordered(function, _OWN_FUNCTION_FIELDS)}
    return _ordered(tool, _OWN_TOOL_FIELDS)


def _ordered(fields: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """The same fields, the named ones in front."""
    return {name: fields[name] for name in first if name in fields} | fields


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none counts as empty, so that the conversation can go on."""
    if isinstance(arguments, str):
        escapes = "\\u" in arguments
        try:
            arguments = json.loads(arguments)
            if escapes:
                # The body is UTF-8, but this is JSON of its own, which may name what has no UTF-8 form.
                json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            # Engines refuse it only if the template shows it.
            raise UnsupportedPromptError(f"{where} holds half of a surrogate pair", where) from error
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
