"""The tools of an OpenAI Responses request as those of a chat, by the rules of vLLM's server.

Decoded JSON in, decoded JSON out. A model is shown functions only: a namespace's under their full names, a
tool with an input of its own form as a function of one text, and none of the tools that a server runs itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenization.errors import PromptError, UnsupportedPromptError

Tool = Mapping[str, Any]

# The types of the API that no model is shown.
_SERVERS_OWN = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
# As vLLM words it.
_ONE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def function_tools(tools: object) -> list[dict[str, Any]]:
    """The functions that a model is shown, as a chat's `tools`, in the request's order.

    Raises:
        PromptError: `tools` is no list of tools.
        UnsupportedPromptError: It is not known what a tool is shown as.
    """
    return [
        {"type": "function", "function": function}
        for at, tool in enumerate(_tools(tools, "tools"))
        for function in _functions(tool, f"tools[{at}]")
    ]


def _functions(tool: Tool, where: str) -> Iterator[dict[str, Any]]:
    match tool.get("type"):
        case "function":
            yield _function(tool, _name(tool, where), where)
        case "custom":
            form = tool.get("format")
            if isinstance(form, dict) and form.get("type") == "grammar":
                raise UnsupportedPromptError(f"{where}: a grammar is not accepted", "tools")
            shown = {"description": tool.get("description"), "parameters": _ONE_TEXT}
            yield _function(shown, _name(tool, where), where)
        case "namespace":
            for at, inner in enumerate(_tools(tool.get("tools"), f"{where}.tools")):
                if inner.get("type") == "function":
                    named = f"{where}.tools[{at}]"
                    yield _function(inner, f"{_name(tool, where)}__{_name(inner, named)}", named)
        case str() as kind if kind in _SERVERS_OWN:
            return
        case _:
            raise UnsupportedPromptError(f"{where}: tools of this type are not known here", "tools")


def _function(tool: Tool, name: str, where: str) -> dict[str, Any]:
    known = {
        "name": name,
        "description": _optional(tool, "description", str, where),
        "parameters": _optional(tool, "parameters", dict, where),
    }
    flags = {flag: _optional(tool, flag, bool, where) for flag in ("strict", "defer_loading")}
    return known | {flag: value for flag, value in flags.items() if value is not None}


def _optional(tool: Tool, name: str, kind: type, where: str) -> object:
    value = tool.get(name)
    if value is not None and not isinstance(value, kind):
        raise PromptError(f"{where}.{name} has the wrong type", "tools")
    return value


def _name(tool: Tool, where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise PromptError(f"{where}.name must be a string", "tools")
    return name


def _tools(tools: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError(f"{where} must be a list of objects", "tools")
    return tools
