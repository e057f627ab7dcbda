"""An OpenAI Responses body as the chat body that vLLM's server makes of it before it renders a prompt.

Decoded JSON in, decoded JSON out, as in vLLM 0.32 and 0.33. A request that goes on from a stored response is
refused as not supported: only the pod that stored it knows its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenization.errors import PromptError, UnsupportedPromptError
from tokenization.response_items import input_messages
from tokenization.response_tools import function_tools

Body = Mapping[str, Any]

_TAKEN_OVER = ("model", "cache_salt", "chat_template_kwargs")
# What only a server with the conversation or the template can turn into a prompt.
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
    # Other than in a chat, the tokenizer adds its own to what the template writes.
    chat["add_special_tokens"] = True
    chat["messages"] = [*_instructions(body.get("instructions")), *input_messages(body.get("input"))]
    if _goes_on(body.get("input")):
        chat["continue_final_message"], chat["add_generation_prompt"] = True, False
    kwargs = _template_kwargs(chat.get("chat_template_kwargs"))
    if tools := body.get("tools"):
        if functions := function_tools(tools):
            chat["tools"] = functions
        else:
            # Where no tool is a function, the template sees an empty list.
            chat["chat_template_kwargs"] = {"tools": [], **kwargs}
    if (effort := _effort(body.get("reasoning"))) is not None:
        chat["reasoning_effort"] = effort
    if body.get("truncation", "disabled") != "disabled":
        chat["truncate_prompt_tokens"] = -1
        # Some token is always left to the answer: a prompt of the whole context is refused.
        chat["max_tokens"] = body.get("max_output_tokens") or 1
    return chat


def _instructions(instructions: object) -> list[dict[str, Any]]:
    if instructions is None or instructions == "":
        return []
    if not isinstance(instructions, str):
        raise PromptError("instructions must be a string", "instructions")
    return [{"role": "system", "content": instructions}]


def _template_kwargs(kwargs: object) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise PromptError("chat_template_kwargs must be an object", "chat_template_kwargs")
    if any(value in (None, "auto") for value in kwargs.values()):
        raise UnsupportedPromptError(
            "chat_template_kwargs: whether null and auto reach the template depends on the server's flags",
            "chat_template_kwargs",
        )
    return kwargs


def _effort(reasoning: object) -> str | None:
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict):
        raise PromptError("reasoning must be an object", "reasoning")
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise PromptError("reasoning.effort must be a string", "reasoning")
    return effort


def _goes_on(value: object) -> bool:
    """Whether the last item is an answer that is to be continued."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in _UNFINISHED
