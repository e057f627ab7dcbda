"""OpenAI Responses: convert a request's body to the chat body that vLLM's server derives from it.

Follows vLLM 0.32 and 0.33. A request that continues a stored response is rejected as not supported, because
only the pod that stored it knows the prompt. Items without an equivalent message are rejected as well.
Consecutive reasoning, answers and tool calls are merged into one message if possible. All tools become
functions: those of a namespace get their full names, custom tools have one text parameter, and built-in tools
of the server are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenization.apis.chat import Body, OrderedCalls, objects, optional, typed
from tokenization.errors import PromptError, UnsupportedPromptError

_COPIED_FIELDS = ("model", "cache_salt", "chat_template_kwargs")
# Fields that refer to conversations or prompts stored on the server.
_SERVER_STATE = ("previous_response_id", "conversation", "prompt", "previous_input_messages")


def responses_as_chat(body: Body) -> dict[str, Any]:
    """Return the chat completions body with the same prompt.

    Raises:
        PromptError: A field has the wrong type.
        UnsupportedPromptError: The prompt depends on state of the server, or an item is not supported.
    """
    for name in _SERVER_STATE:
        if body.get(name) is not None:
            raise UnsupportedPromptError(f"{name}: the prompt depends on state of the server", name)
    chat = {name: body[name] for name in _COPIED_FIELDS if body.get(name) is not None}
    # Unlike in a chat, the tokenizer adds its special tokens to the rendered text.
    chat["add_special_tokens"] = True
    instructions = optional(body.get("instructions"), str, "instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *input_messages(body.get("input"))]
    if _continues_answer(body.get("input")):
        chat["continue_final_message"], chat["add_generation_prompt"] = True, False
    kwargs = _template_kwargs(chat.get("chat_template_kwargs"))
    if tools := body.get("tools"):
        if functions := function_tools(tools):
            chat["tools"] = functions
        else:
            # If no tool becomes a function, the template receives an empty list.
            chat["chat_template_kwargs"] = {"tools": [], **kwargs}
    reasoning = optional(body.get("reasoning"), dict, "reasoning") or {}
    if (effort := optional(reasoning.get("effort"), str, "reasoning.effort", "reasoning")) is not None:
        chat["reasoning_effort"] = effort
    if body.get("truncation", "disabled") != "disabled":
        chat["truncate_prompt_tokens"] = -1
        # At least one token is left for the answer, because a prompt of the whole context is rejected.
        chat["max_tokens"] = body.get("max_output_tokens") or 1
    return chat


def _template_kwargs(given: object) -> Mapping[str, Any]:
    kwargs = optional(given, dict, "chat_template_kwargs") or {}
    if any(value in (None, "auto") for value in kwargs.values()):
        raise UnsupportedPromptError(
            "chat_template_kwargs: whether null and auto reach the template depends on the server's flags",
            "chat_template_kwargs",
        )
    return kwargs


def _continues_answer(value: object) -> bool:
    """Return whether the last item is an unfinished answer, which the model continues."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


Message = dict[str, Any]

_ROLES = ("user", "system", "developer")
# Fields by which vLLM recognizes a message as output of an earlier response.
_OUTPUT_FIELDS = frozenset(("id", "status", "type"))


def input_messages(given: object) -> list[Message]:
    """Return the messages of a request's `input`, which is a text or a list of items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise PromptError("input must be a string or a list of items", "input")
    messages: list[Message] = []
    for at, item in enumerate(given):
        message = _simple_message(item) or _message(item, f"input[{at}]")
        if not (messages and _merge_assistant(messages[-1], message)):
            messages.append(message)
    return messages


def _merge_assistant(last: Message, message: Message) -> bool:
    """Merge an assistant's message into its last one if they have no common field; return whether merged."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    if "tool_calls" in message:
        # Extended in place, because a request may contain very many calls.
        last.setdefault("tool_calls", OrderedCalls()).extend(message["tool_calls"])
        return True
    if message.keys() & last.keys() != {"role"}:
        return False
    last |= message
    return True


def _simple_message(item: object) -> Message | None:
    """Convert a plain message, the most common item, faster than `_message`; else None."""
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


def _message(given: object, where: str) -> Message:
    item = typed(given, dict, where)
    match item.get("type", "message"):
        case "message":
            return _role_message(item, where)
        case "function_call":
            name = _text(item, "name", where)
            if item.get("namespace"):
                name = f"{_text(item, 'namespace', where)}__{name}"
            return _call_message(name, _text(item, "arguments", where), item, where)
        case "custom_tool_call":
            arguments = json.dumps({"input": _text(item, "input", where)}, ensure_ascii=False)
            return _call_message(_text(item, "name", where), arguments, item, where)
        case "function_call_output" | "custom_tool_call_output":
            output = _content(item, "output", where)
            return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
        case "reasoning" if not item.get("encrypted_content"):
            return {"role": "assistant", "reasoning": _reasoning_text(item, where)}
    raise UnsupportedPromptError(f"{where}: items of this type are not supported here", where)


def _role_message(item: Body, where: str) -> Message:
    role, content = item.get("role"), _content(item, "content", where)
    if role == "assistant":
        if item.keys() >= _OUTPUT_FIELDS and isinstance(content, str):
            raise UnsupportedPromptError(
                f"{where}: the content of an answer with an id and status must be a list of parts", where
            )
        # vLLM uses only the first part of an answer.
        return {"role": role, "content": content if isinstance(content, str) else _first_text(content, where)}
    if role not in _ROLES:
        raise PromptError(f"{where}.role must be assistant or one of {', '.join(_ROLES)}", where)
    if role == "developer" and "tools" in item:
        raise UnsupportedPromptError(f"{where}: a message with tools is not supported here", where)
    return {name: item[name] for name in ("role", "content", "name", "task") if name in item}


def _call_message(name: str, arguments: str, item: Body, where: str) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": _text(item, "call_id", where), "function": function, "type": "function"}
    return {"role": "assistant", "tool_calls": OrderedCalls([call])}


def _reasoning_text(item: Body, where: str) -> str:
    for name in ("content", "summary"):
        if parts := optional(item.get(name), list, f"{where}.{name}", where):
            return _first_text(parts, where)
    return ""


def _first_text(parts: list[Any], where: str) -> str:
    first = parts[0] if parts else None
    if not isinstance(first, dict) or not isinstance(first.get("text"), str):
        raise UnsupportedPromptError(f"{where}: a first part other than text is not supported", where)
    return str(first["text"])


def _content(item: Body, name: str, where: str) -> str | list[Any]:
    content = item.get(name)
    if not isinstance(content, str | list):
        raise PromptError(f"{where}.{name} must be a string or a list", where)
    return content


def _text(item: Body, name: str, where: str, param: str | None = None) -> str:
    return typed(item.get(name), str, f"{where}.{name}", param or where)


# Tools that the server runs itself; models do not see them.
_BUILT_IN_TOOLS = frozenset(
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
# Parameters of a custom tool, in vLLM's words.
_TEXT_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def function_tools(tools: object) -> list[dict[str, Any]]:
    """Convert tools to functions as in a chat's `tools`, in the request's order."""
    return [
        {"type": "function", "function": function}
        for at, tool in enumerate(objects(tools, "tools"))
        for function in _functions(tool, f"tools[{at}]")
    ]


def _functions(tool: Body, where: str) -> Iterator[dict[str, Any]]:
    match tool.get("type"):
        case "function":
            yield _function(tool, _text(tool, "name", where, "tools"), where)
        case "custom":
            form = tool.get("format")
            if isinstance(form, dict) and form.get("type") == "grammar":
                raise UnsupportedPromptError(f"{where}: a grammar is not accepted", "tools")
            shown = {"description": tool.get("description"), "parameters": _TEXT_PARAMETERS}
            yield _function(shown, _text(tool, "name", where, "tools"), where)
        case "namespace":
            for at, inner in enumerate(objects(tool.get("tools"), f"{where}.tools", "tools")):
                if inner.get("type") == "function":
                    named = f"{where}.tools[{at}]"
                    yield _function(
                        inner,
                        f"{_text(tool, 'name', where, 'tools')}__{_text(inner, 'name', named, 'tools')}",
                        named,
                    )
        case str() as kind if kind in _BUILT_IN_TOOLS:
            return
        case _:
            raise UnsupportedPromptError(f"{where}: tools of this type are not supported", "tools")


def _function(tool: Body, name: str, where: str) -> dict[str, Any]:
    known: dict[str, Any] = {
        "name": name,
        "description": optional(tool.get("description"), str, f"{where}.description", "tools"),
        "parameters": optional(tool.get("parameters"), dict, f"{where}.parameters", "tools"),
    }
    for flag in ("strict", "defer_loading"):
        if (value := optional(tool.get(flag), bool, f"{where}.{flag}", "tools")) is not None:
            known[flag] = value
    return known
