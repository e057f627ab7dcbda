"""The input items of an OpenAI Responses request as chat messages, by the rules of vLLM's server.

Decoded JSON in, decoded JSON out. A thought, an answer and calls that follow one another are one message, as
far as they fit into one. What vLLM has no message for is refused as not supported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenization.chat_tools import CallsInOrder
from tokenization.errors import PromptError, UnsupportedPromptError

Item = Mapping[str, Any]
Message = dict[str, Any]

_SPEAKERS = ("user", "system", "developer")
# With these vLLM takes a message for a part of another response.
_OUTPUT_FIELDS = frozenset(("id", "status", "type"))
# What is read of their messages; an answer's other fields are dropped.
_SPOKEN_FIELDS = ("role", "content", "name", "task")


def input_messages(given: object) -> list[Message]:
    """The messages of a request's `input`: a text, or a list of items.

    Raises:
        PromptError: An item has the wrong form.
        UnsupportedPromptError: vLLM has no message for an item.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise PromptError("input must be a string or a list of items", "input")
    messages: list[Message] = []
    for at, item in enumerate(given):
        message = _plain(item) or _message(item, f"input[{at}]")
        if not (messages and _joined(messages[-1], message)):
            messages.append(message)
    return messages


def _joined(last: Message, message: Message) -> bool:
    """Adds what an assistant did to its last message, if that has room for it."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    if "tool_calls" in message:
        # Added to, not made anew: a request may hold very many calls.
        last.setdefault("tool_calls", CallsInOrder()).extend(message["tool_calls"])
        return True
    if message.keys() & last.keys() != {"role"}:
        return False
    last |= message
    return True


def _plain(item: object) -> Message | None:
    """The most common item, what somebody said: the same as `_message` makes of it, at less cost."""
    if type(item) is not dict or item.get("type", "message") != "message":
        return None
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        if item.keys() >= _OUTPUT_FIELDS and type(content) is str:
            return None
        if type(content) is list and content and type(content[0]) is dict:
            content = content[0].get("text")
        return {"role": role, "content": content} if type(content) is str else None
    if role != "user" or type(content) not in (str, list) or "name" in item or "task" in item:
        return None
    return {"role": role, "content": content}


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise PromptError(f"{where} must be an object", where)
    match item.get("type", "message"):
        case "message":
            return _said(item, where)
        case "function_call":
            name = _text(item, "name", where)
            if item.get("namespace"):
                name = f"{_text(item, 'namespace', where)}__{name}"
            return _called(name, _text(item, "arguments", where), item, where)
        case "custom_tool_call":
            arguments = json.dumps({"input": _text(item, "input", where)}, ensure_ascii=False)
            return _called(_text(item, "name", where), arguments, item, where)
        case "function_call_output" | "custom_tool_call_output":
            output = _content(item, "output", where)
            return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
        case "reasoning" if not item.get("encrypted_content"):
            return {"role": "assistant", "reasoning": _thought(item, where)}
    raise UnsupportedPromptError(f"{where}: items of this type are not supported here", where)


def _said(item: Item, where: str) -> Message:
    role, content = item.get("role"), _content(item, "content", where)
    if role == "assistant":
        if item.keys() >= _OUTPUT_FIELDS and isinstance(content, str):
            raise UnsupportedPromptError(
                f"{where}: an answer of this form has parts, which vLLM looks for", where
            )
        # Of an answer's parts vLLM takes the first.
        return {"role": role, "content": content if isinstance(content, str) else _first(content, where)}
    if role not in _SPEAKERS:
        raise PromptError(f"{where}.role must be assistant or one of {', '.join(_SPEAKERS)}", where)
    if role == "developer" and "tools" in item:
        raise UnsupportedPromptError(f"{where}: a message with tools is not supported here", where)
    return {name: item[name] for name in _SPOKEN_FIELDS if name in item}


def _called(name: str, arguments: str, item: Item, where: str) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": _text(item, "call_id", where), "function": function, "type": "function"}
    return {"role": "assistant", "tool_calls": CallsInOrder([call])}


def _thought(item: Item, where: str) -> str:
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise PromptError(f"{where}.{name} must be a list", where)
        if parts:
            return _first(parts, where)
    return ""


def _first(parts: list[Any], where: str) -> str:
    first = parts[0] if parts else None
    if not isinstance(first, dict) or not isinstance(first.get("text"), str):
        raise UnsupportedPromptError(f"{where}: what does not begin with a text is not supported here", where)
    return str(first["text"])


def _content(item: Item, name: str, where: str) -> str | list[Any]:
    content = item.get(name)
    if not isinstance(content, str | list):
        raise PromptError(f"{where}.{name} must be a string or a list", where)
    return content


def _text(item: Item, name: str, where: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise PromptError(f"{where}.{name} must be a string", where)
    return text
