"""OpenAI tools and calls of them, checked and brought into the form that vLLM hands to chat templates.

Decoded JSON in, dicts for the template out. Many templates print them as JSON, so the order of fields counts:
it is that of vLLM's own types, whatever the client's was. Knows no messages, templates or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenization.errors import PromptError, UnsupportedPromptError

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
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError("tools must be a list of objects", "tools")
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]


def developer_tools(tools: object) -> object:
    """The tools in a developer's message, of which only the order of fields is changed."""
    if not isinstance(tools, list):
        return tools
    return [_own_tool(tool) if isinstance(tool, dict) else tool for tool in tools]


def tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Checks an assistant's calls; the JSON text of their arguments becomes an object.

    Raises:
        PromptError: `calls` is no list of calls of functions.
    """
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
