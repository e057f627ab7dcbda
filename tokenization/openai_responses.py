"""An OpenAI Responses body as the chat body that vLLM's server makes of it before it renders a prompt.

Decoded JSON in, decoded JSON out. A request that goes on from a stored response is refused as not supported:
only the pod that stored it knows its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenization.errors import PromptError, UnsupportedPromptError

Body = Mapping[str, Any]

_TAKEN_OVER = ("model", "cache_salt", "chat_template_kwargs", "add_special_tokens")
# What only a server with the conversation, the template or the tools can turn into a prompt.
_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
_UNFINISHED = ("in_progress", "incomplete")


def responses_as_chat(body: Body) -> dict[str, Any]:
    """The chat completions body with the same prompt.

    Raises:
        PromptError: A field has the wrong type.
        UnsupportedPromptError: The prompt is not in the request alone.
    """
    for name in _ELSEWHERE:
        if body.get(name) is not None:
            raise UnsupportedPromptError(f"{name}: the prompt is not in the request alone", name)
    chat = {name: body[name] for name in _TAKEN_OVER if body.get(name) is not None}
    chat["messages"] = [*_instructions(body.get("instructions")), *_input(body.get("input"))]
    if _goes_on(body.get("input")):
        chat["continue_final_message"], chat["add_generation_prompt"] = True, False
    if body.get("tools") and body.get("tool_choice") != "none":
        raise UnsupportedPromptError("tools: how they are written out depends on the release", "tools")
    reasoning, kwargs = body.get("reasoning"), chat.get("chat_template_kwargs", {})
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None and isinstance(kwargs, dict):
        chat["chat_template_kwargs"] = {"reasoning_effort": reasoning["effort"], **kwargs}
    return chat


def _instructions(instructions: object) -> list[dict[str, Any]]:
    if instructions is None or instructions == "":
        return []
    if not isinstance(instructions, str):
        raise PromptError("instructions must be a string", "instructions")
    return [{"role": "system", "content": instructions}]


def _input(value: object) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [_message(item, f"input[{at}]") for at, item in enumerate(_list(value, "input"))]


def _message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise PromptError(f"{where} must be an object", where)
    kind = item.get("type", "message")
    if kind == "message":
        # Of a given answer's parts vLLM takes the first, or joins them: that depends on how it was written.
        if item.get("role") == "assistant" and isinstance(content := item.get("content"), list):
            return {"role": "assistant", "content": _first_text(content, where)}
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning" and not item.get("encrypted_content"):
        return {"role": "assistant", "reasoning": _thought(item)}
    raise UnsupportedPromptError(f"{where}: items of this type are not supported here", where)


def _first_text(content: list[Any], where: str) -> str:
    first = content[0] if content else None
    if len(content) != 1 or not isinstance(first, dict) or not isinstance(first.get("text"), str):
        raise UnsupportedPromptError(f"{where}: an answer of several parts is not supported here", where)
    return str(first["text"])


def _thought(item: Body) -> str:
    for name in ("summary", "content"):
        parts = item.get(name)
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
            return str(parts[0].get("text") or "")
    return ""


def _goes_on(value: object) -> bool:
    """Whether the last item is an answer that is to be continued."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in _UNFINISHED


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PromptError(f"{where} must be a list", where)
    return value
