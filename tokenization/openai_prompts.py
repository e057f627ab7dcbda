"""An OpenAI request's prompt: a decoded JSON body in, token ids out, by the rules vLLM's server follows.

Both the router and the model server call this, so what the router predicts is what the engine sees. Knows
nothing of sampling fields, HTTP or models' names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenization.errors import PromptError, PromptTooLongError, UnsupportedPromptError
from tokenization.tokenizer import PromptTokenizer

Body = Mapping[str, Any]

_SHOWN_CHARS = 64


def completion_prompts(
    body: Body, tokenizer: PromptTokenizer, *, chars_max: int | None = None
) -> list[list[int]]:
    """Token ids of every prompt of a /v1/completions body (`prompt`: text, ids, or a list of either).

    Args:
        body: The decoded JSON.
        tokenizer: The model's.
        chars_max: Longer text is refused without the work of encoding it; None takes any.

    Raises:
        PromptError: A field has the wrong type, or an id is outside the vocabulary.
        PromptTooLongError: A text is longer than `chars_max`.
    """
    prompt = body.get("prompt")
    special = _flag(body, "add_special_tokens", True)
    if isinstance(prompt, str):
        return [_encode(prompt, tokenizer, "prompt", special, chars_max)]
    if not isinstance(prompt, list) or not prompt:
        raise PromptError(
            "prompt must be a string, a list of token ids, or a non-empty list of these", "prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return [_encode(text, tokenizer, "prompt", special, chars_max) for text in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [_checked_ids(ids, tokenizer) for ids in prompt]
    return [_checked_ids(prompt, tokenizer)]


def chat_prompt(body: Body, tokenizer: PromptTokenizer, *, chars_max: int | None = None) -> list[int]:
    """Token ids of a /v1/chat/completions body; arguments as for `completion_prompts`.

    Raises:
        PromptError: `messages` or a template option has the wrong type, or the template refuses the messages.
        PromptTooLongError: The rendered text, tools included, is longer than `chars_max`.
        UnsupportedPromptError: A message holds a part other than text, or the model has no chat template.
    """
    if body.get("chat_template") is not None:
        raise PromptError("a chat template in the request is not accepted", "chat_template")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise PromptError("chat_template_kwargs must be an object", "chat_template_kwargs")
    parts = tokenizer.chat_template is not None and tokenizer.chat_template.wants_parts
    text = tokenizer.render_chat(
        chat_messages(body.get("messages"), wants_parts=parts),
        tools=_tools(body),
        add_generation_prompt=_flag(body, "add_generation_prompt", True),
        continue_final_message=_flag(body, "continue_final_message", False),
        template_kwargs=kwargs,
    )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # The body is UTF-8, but a tool call's arguments are JSON of their own, which may escape one.
        raise PromptError("messages hold half of a surrogate pair", "messages") from error
    return _encode(text, tokenizer, "messages", _flag(body, "add_special_tokens", False), chars_max)


def chat_messages(messages: object, *, wants_parts: bool) -> list[dict[str, Any]]:
    """Checks OpenAI messages and brings them into the form chat templates expect.

    Text parts are joined by line feeds unless the template loops over parts; the JSON text of tool calls'
    arguments becomes an object.

    Raises:
        PromptError: Naming the message that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a non-empty list", "messages")
    return [_message(message, f"messages[{at}]", wants_parts) for at, message in enumerate(messages)]


def _encode(
    text: str, tokenizer: PromptTokenizer, param: str, special: bool, chars_max: int | None
) -> list[int]:
    if chars_max is not None and len(text) > chars_max:
        raise PromptTooLongError(len(text), chars_max, param)
    return tokenizer.encode(text, add_special_tokens=special)


def _message(message: object, where: str, wants_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"{where} must be an object with a role", where)
    known = dict(message)
    known["content"] = _content(message.get("content"), where, wants_parts)
    if message.get("tool_calls"):
        known["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return known


def _content(content: object, where: str, wants_parts: bool) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wants_parts else content
    if content is None:
        return None
    if not isinstance(content, list):
        raise PromptError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    texts = [_part_text(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if wants_parts else "\n".join(texts)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PromptError(f"{where} must be an object with a type", where)
    if part["type"] not in ("text", "input_text", "output_text", "refusal"):
        raise UnsupportedPromptError(
            f"{where}: parts of type {part['type'][:_SHOWN_CHARS]!r} are not supported", where
        )
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise PromptError(f"{where}.text must be a string", where)
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise PromptError(f"{where} must be a list", where)
    known = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise PromptError(f"{where}[{at}].function must be an object", where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    f"{where}[{at}].function.arguments is not valid JSON: {error}", where
                ) from error
        known.append({**call, "function": {**function, "arguments": arguments or {}}})
    return known


def _tools(body: Body) -> Sequence[Mapping[str, Any]] | None:
    tools = body.get("tools")
    if tools is None or tools == [] or body.get("tool_choice") == "none":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError("tools must be a list of objects", "tools")
    return tools


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PromptError(f"{name} must be true or false", name)
    return value


def _checked_ids(ids: list[object], tokenizer: PromptTokenizer) -> list[int]:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < tokenizer.vocab_size:
            # Not shown: it may be anything, and nested too deeply to be shown.
            raise PromptError(f"token ids must be integers from 0 to {tokenizer.vocab_size - 1}", "prompt")
    return cast("list[int]", ids)
