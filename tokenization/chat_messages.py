"""OpenAI messages and tools, checked and brought into the form that vLLM's server hands to chat templates.

Decoded JSON in, dicts for the template out. Knows no templates, tokens or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
_SHOWN_CHARS = 64


def decoded(messages: object) -> object:
    """Messages that are still JSON text, decoded; others as they are. None for what is no JSON."""
    if not isinstance(messages, msgspec.Raw):
        return messages
    try:
        return msgspec.json.decode(messages)
    except (ValueError, RecursionError):
        return None


def chat_messages(
    messages: object, *, wants_parts: bool, media_mark: str | None = None
) -> list[dict[str, Any]]:
    """Checks OpenAI messages and brings them into the form chat templates expect.

    Text parts are joined by line feeds unless the template loops over parts; the JSON text of tool calls'
    arguments becomes an object.

    Args:
        messages: The request's `messages`.
        wants_parts: Whether the template loops over a message's parts.
        media_mark: Text to put in front of each image, sound or film; None refuses messages that hold one.

    Raises:
        PromptError: Naming the message that is wrong.
        MediaPromptError: A message holds a part other than text, and there is no `media_mark`.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a non-empty list", "messages")
    return [
        _plain(message, wants_parts) or _message(message, f"messages[{at}]", wants_parts, media_mark)
        for at, message in enumerate(messages)
    ]


def chat_tools(tools: object) -> Sequence[Mapping[str, Any]] | None:
    """Checks tool definitions and orders their fields as vLLM does: what is not given is there as null.

    Raises:
        PromptError: `tools` is no list of functions.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError("tools must be a list of objects", "tools")
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where}.function must be an object with a name", "tools")
    ordered = {"name": function["name"], "description": None, "parameters": None} | function
    return {"type": "function", "function": ordered} | {**tool, "function": ordered}


def _plain(message: object, wants_parts: bool) -> dict[str, Any] | None:
    """The most common message, a role and a text: the same as `_message` makes of it, at less cost."""
    if type(message) is not dict or len(message) != 2:
        return None
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or type(content) is not str or role == "developer":
        return None
    if wants_parts and role != "tool":
        return {"role": role, "content": [{"type": "text", "text": content}]}
    return {"role": role, "content": content}


def _message(message: object, where: str, wants_parts: bool, media_mark: str | None) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise PromptError(f"{where} must be an object with a role", where)
    content = message.get("content")
    # A tool's answer is a string to every template.
    content = _content(content, where, wants_parts and role != "tool", media_mark)
    known: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        # An empty list would put a template on its tool path.
        if calls := message.get("tool_calls"):
            known["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            known["reasoning"] = known["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            known["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        known["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            known[name] = message[name]
    return known


def _content(content: object, where: str, wants_parts: bool, media_mark: str | None) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    if content is None:
        return [] if wants_parts else ""
    if not isinstance(content, list):
        raise PromptError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    where = f"{where}.content"
    parts: list[dict[str, str]] = []
    media = False
    for at, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") in _MEDIA_TYPES:
            if media_mark is None:
                raise MediaPromptError(f"{where}[{at}]: media parts have no token ids here", where)
            media = True
            parts += {"type": "text", "text": media_mark}, {"type": _MEDIA_TYPES[part["type"]]}
        elif (text := _part_text(part, f"{where}[{at}]")) is not None:
            parts.append({"type": "text", "text": text})
    if wants_parts:
        return parts
    texts = "\n".join(part["text"] for part in parts if part.get("text"))
    # Engines put the places of media in front of the message's text.
    return f"{media_mark}{texts}" if media else texts


def _part_text(part: object, where: str) -> str | None:
    """A text part's text; None for one that has none, which engines skip."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PromptError(f"{where} must be an object with a type", where)
    kind = part["type"]
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


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise PromptError(f"{where} must be a list", where)
    known = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise PromptError(f"{where}[{at}].function must be an object", where)
        arguments = _arguments(function.get("arguments"), where)
        known.append({**call, "function": {**function, "arguments": arguments}})
    return known


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
            raise PromptError(f"{where} holds half of a surrogate pair", where) from error
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}
