"""Prompts in Mistral's own format, by the library mistral-common, from `tekken.json` or `tokenizer.model.v*`.

Follows vLLM 0.32, which does not check the order of messages, and shortens the ids of tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tokenization.apis.chat import Body, chat_tools, objects
from tokenization.coded.prompts import TokenIds, check_texts, missing_library, unsupported
from tokenization.errors import TokenizerLoadError

_FIELDS = {"role", "name", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"}
# Fields whose effect depends on the release, or which engines reject for these models.
_REFUSED = ("chat_template", "chat_template_kwargs", "documents", "truncate_prompt_tokens")
_CALL_ID_CHARS = 9


class MistralPrompts:
    """Prompts of the model with this tokenizer file. Thread-safe.

    Raises:
        TokenizerLoadError: mistral-common is not installed, or the file is broken.
    """

    effort_without_thinking = "none"  # for the Messages API

    def __init__(self, file: Path) -> None:
        try:
            from mistral_common.protocol.instruct.request import ChatCompletionRequest
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError as error:
            raise missing_library("Mistral's own tokenizer", "mistral-common") from error
        try:
            self._tokenizer = MistralTokenizer.from_file(str(file), mode=ValidationMode.test)
        except Exception as error:  # errors of many kinds for a broken file
            raise TokenizerLoadError(f"{file}: {error}") from error
        self._text: Any = self._tokenizer.instruct_tokenizer.tokenizer
        self._request: Any = ChatCompletionRequest

    def chat(self, body: Body) -> TokenIds:
        """Return the token ids of a chat, whose messages are decoded.

        Raises:
            UnsupportedPromptError: An engine may treat the request differently.
        """
        messages = [_message(message) for message in objects(body.get("messages"), "messages")]
        tools, options = chat_tools(body.get("tools")), {}
        flags = body.get("continue_final_message", False), body.get("add_generation_prompt", True)
        answered = bool(messages) and messages[-1].get("role") == "assistant"
        refused = any(body.get(name) is not None for name in _REFUSED)
        if refused or flags not in ((answered, not answered), (False, False)):
            raise unsupported("mistral-common takes no such options")
        if self._text.version.supports_model_settings:
            options["reasoning_effort"] = body.get("reasoning_effort")
        check_texts([*messages, *(tools or ())])
        try:
            request = self._request.from_openai(messages, tools, continue_final_message=flags[0], **options)
            return np.asarray(self._tokenizer.encode_chat_completion(request).tokens, np.uint32)
        except Exception as error:  # errors of many kinds; the engine answers with a better one
            raise unsupported(f"mistral-common rejects the request: {error}") from error

    def text_ids(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a text, special tokens as plain text. Raises UnsupportedPromptError if it is too long."""
        check_texts([text])
        return np.asarray(self._text.encode(text, bos=add_special_tokens, eos=False), np.uint32)

    def longest_piece(self) -> Tokenizer:
        """Return a tokenizer with the longest piece only, for a model without `tokenizer.json`."""
        return Tokenizer(BPE({max(self._text.vocab(), key=len): 0}, []))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to the library."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if isinstance(content, str | None) else [content]
    is_plain = all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in parts)
    if not is_plain or not message.keys() <= _FIELDS:
        raise unsupported("mistral-common takes plain texts only")
    known = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message.get("reasoning") is None and message.get("reasoning_content") is not None:
        known["reasoning"] = message["reasoning_content"]
    if message.get("role") == "assistant":
        known["tool_calls"] = [_call(call) for call in objects(message.get("tool_calls") or [], "tool_calls")]
    elif isinstance(call_id := message.get("tool_call_id"), str):
        known["tool_call_id"] = call_id[-_CALL_ID_CHARS:]
    return known


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    match call:
        case {"id": str() as call_id, "function": {"name": str() as name, "arguments": str() as arguments}}:
            function = {"name": name, "arguments": arguments}
            return {"id": call_id[-_CALL_ID_CHARS:], "type": "function", "function": function}
    raise unsupported("a call must have an id, a name and arguments of text")
