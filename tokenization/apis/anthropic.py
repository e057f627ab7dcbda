"""Anthropic Messages: convert a request's body to the chat body that vLLM's server derives from it.

Checks only the fields that it uses. Requests that vLLM's releases convert differently are rejected as not
supported, so that wrong token ids are never used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenization.apis.chat import BILLING, Body, objects, optional, typed
from tokenization.errors import PromptError, UnsupportedPromptError

_COPIED_FIELDS = ("model", "max_tokens", "cache_salt", "chat_template_kwargs", "add_special_tokens")
_IMAGE = "image"


def messages_as_chat(body: Body, effort_without_thinking: str = "none") -> dict[str, Any]:
    """Return the chat completions body with the same prompt.

    Args:
        effort_without_thinking: `reasoning_effort` of this model for disabled thinking, see `ChatTemplate`.

    Raises:
        PromptError: A field has the wrong type.
        UnsupportedPromptError: vLLM's releases convert a part of the request differently.
    """
    system = [*_system(body.get("system"))]
    messages = [*system, *_turns(body.get("messages"), may_begin_with_system=not system)]
    chat = {name: body[name] for name in _COPIED_FIELDS if body.get(name) is not None}
    chat["messages"] = messages
    if (tools := body.get("tools")) is not None:
        # `tool_choice` changes only the grammar. "none" would change the prompt, but this API lacks it.
        chat["tools"] = [_tool(tool) for tool in objects(tools, "tools")]
        kwargs = chat.get("chat_template_kwargs", {})
        if not tools and isinstance(kwargs, dict) and kwargs.get("tools") in (None, "auto"):
            # Unlike in a chat, the template receives an empty list.
            chat["chat_template_kwargs"] = {**kwargs, "tools": []}
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        chat["reasoning_effort"] = effort_without_thinking
    return chat


def _system(system: object) -> Iterator[dict[str, Any]]:
    if not system:
        return
    if isinstance(system, str):
        yield {"role": "system", "content": system}
        return
    texts = [_text(block, "system") for block in objects(system, "system") if block.get("type") == "text"]
    if text := "".join(text for text in texts if not text.startswith(BILLING)):
        yield {"role": "system", "content": text}


def _turns(messages: object, *, may_begin_with_system: bool) -> Iterator[dict[str, Any]]:
    for at, message in enumerate(objects(messages, "messages")):
        if (plain := _simple_message(message)) is not None:
            yield plain
            continue
        role, content, where = message.get("role"), message.get("content"), f"messages[{at}]"
        if role == "system":
            text = _single_text(content)
            if at == 0 and may_begin_with_system and text and not text.startswith(BILLING):
                # All releases make it the system message, although in different ways.
                yield {"role": "system", "content": text}
                continue
            raise UnsupportedPromptError(
                f"{where}: the place of a system message within a conversation depends on the release", where
            )
        if role not in ("user", "assistant"):
            raise PromptError(f"{where}.role must be user or assistant", where)
        if isinstance(content, str):
            yield {"role": role, "content": content}
        else:
            yield from _turn(role, objects(content, f"{where}.content"), where)


def _simple_message(message: Body) -> dict[str, Any] | None:
    """Convert a message of a role and one text, the most common form, faster than `_turn`; else None."""
    role, text = message.get("role"), _single_text(message.get("content"))
    if role not in ("user", "assistant") or not text:
        return None
    return {"role": role, "content": text}


def _single_text(content: object) -> str | None:
    """Return a content that is a single text, or None."""
    if type(content) is list and len(content) == 1 and type(content[0]) is dict:
        content = content[0].get("text") if content[0].get("type") == "text" else None
    return content if type(content) is str else None


def _turn(role: str, blocks: Sequence[Body], where: str) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if text := _text(block, where):
                parts.append({"type": "text", "text": text})
        elif kind == _IMAGE:
            # vLLM ignores an image without a source, except within a result.
            if source := block.get("source"):
                parts.append(_image(source, where))
        elif kind == "thinking":
            if block.get("thinking") is not None:
                thoughts.append(_text(block, where, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "tool_result" and role == "user":
            # Results come before all other content of the user's turn.
            yield from _result(block, where)
        elif kind != "redacted_thinking":
            raise UnsupportedPromptError(f"{where}: blocks of this type are not supported here", where)
    # An assistant's empty turn is kept.
    if role == "user" and not parts:
        return
    turn: dict[str, Any] = {"role": role}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        turn["content"] = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
    yield turn


def _result(block: Body, where: str) -> Iterator[dict[str, Any]]:
    content = block.get("content")
    images: list[dict[str, Any]] = []
    if isinstance(content, list):
        texts = []
        for item in objects(content, f"{where}.content"):
            if item.get("type") == "text":
                texts.append(_text(item, where))
            elif item.get("type") == _IMAGE:
                image = _image(item.get("source", {}), where)
                if image["image_url"]["url"]:
                    images.append(image)
            else:
                raise UnsupportedPromptError(f"{where}: results of this type are not supported here", where)
        content = "\n".join(texts)
    if content is not None and not isinstance(content, str):
        raise PromptError(f"{where}: a result's content must be a string or a list of blocks", where)
    yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content or ""}
    if images:
        yield {"role": "user", "content": images}


def _call(block: Body, where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not (given is None or isinstance(given, dict)):
        raise PromptError(f"{where}: a tool_use block must have a name, and an object as its input", where)
    function = {"name": name, "arguments": json.dumps(given or {})}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _tool(tool: Body) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(schema, dict):
        raise UnsupportedPromptError("the provider's built-in tools are not supported", "tools")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": parameters}
    function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _image(given: object, where: str) -> dict[str, Any]:
    source = typed(given, dict, f"{where}: an image's source", where)
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": typed(url, str, f"{where}: an image's url", where)}}


def _text(block: Body, where: str, name: str = "text") -> str:
    return optional(block.get(name), str, f"{where}: {name}", where) or ""
