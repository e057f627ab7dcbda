"""Chats of gpt-oss in OpenAI's Harmony format, by the library oss-harmony, whose vocabulary is built in.

Follows vLLM 0.32. The prompt has the date of the engine's local clock, so this process must have the engine's
time zone (TZ). As in the engine, VLLM_SYSTEM_START_DATE sets another date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from tokenization.apis.chat import Body, chat_tools, objects
from tokenization.coded.prompts import TokenIds, check_texts, missing_library, unsupported

_EFFORTS = ("low", "medium", "high")
_ANALYSIS, _COMMENTARY, _FINAL = "analysis", "commentary", "final"
_TEXT_TYPES = ("text", "input_text", "output_text")
_FUNCTION = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Time around midnight in which an engine may have either date.
_DATE_CHANGE = timedelta(seconds=5)

Message = dict[str, Any]  # in the library's form


class HarmonyPrompts:
    """Chat prompts of gpt-oss. Thread-safe.

    Raises:
        TokenizerLoadError: oss-harmony is not installed.
    """

    effort_without_thinking = "low"  # for the Messages API, because engines reject "none"

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        try:
            version("oss-harmony")  # openai-harmony has the same module, but downloads its vocabulary
            import openai_harmony
        except (ImportError, PackageNotFoundError) as error:
            raise missing_library("gpt-oss", "oss-harmony") from error
        self._library: Any = openai_harmony
        self._encoding: Any = openai_harmony.load_harmony_encoding("HarmonyGptOss")
        self._now = now

    def chat(self, body: Body) -> TokenIds:
        """Return the token ids of a chat, whose messages are decoded.

        Raises:
            UnsupportedPromptError: An engine may treat the request differently.
        """
        messages = objects(body.get("messages"), "messages")
        tools = [tool["function"] for tool in chat_tools(body.get("tools")) or ()]
        effort = "medium" if body.get("reasoning_effort") is None else body["reasoning_effort"]
        if effort not in _EFFORTS or body.get("truncate_prompt_tokens") is not None:
            raise unsupported("gpt-oss has no such effort, and no truncation")
        system = {"conversation_start_date": self._date(), "reasoning_effort": effort.capitalize()}
        shown: list[Message] = [{"role": "system", "content": [{"type": "system_content", **system}]}]
        instructions = None
        if messages and messages[0].get("role") in ("system", "developer"):
            texts, messages = _texts(messages[0].get("content")), messages[1:]
            instructions = None if texts is None else "".join(texts)
        if instructions or tools:
            shown.append(_developer(instructions, tools))
        shown += _without_old_analysis(list(_shown(messages)))
        check_texts(shown)
        library = self._library
        try:
            ids = self._encoding.render_conversation_for_completion(
                library.Conversation.from_messages([*map(library.Message.from_dict, shown)]),
                library.Role.ASSISTANT,
                config=library.RenderConversationConfig(auto_drop_analysis=False),
            )
        except (ValueError, TypeError, RecursionError, library.HarmonyError) as error:
            raise unsupported(f"oss-harmony rejects the request: {error}") from error
        return np.asarray(self._with_older_headers(ids, shown), np.uint32)

    def _date(self) -> str:
        if fixed := os.environ.get("VLLM_SYSTEM_START_DATE"):
            return fixed
        now = self._now()
        if (now - _DATE_CHANGE).date() != (now + _DATE_CHANGE).date():
            raise unsupported("the date in gpt-oss's prompts is about to change")
        return now.strftime("%Y-%m-%d")

    def _with_older_headers(self, ids: list[int], shown: Sequence[Message]) -> list[int]:
        """Replace the headers of tool calls by those before oss-harmony 0.0.10, as gpt-oss writes them.

        Texts never contain ids of special tokens, so each message begins at one `<|start|>`.
        """
        encode = self._encoding.encode
        special = (f"<|{name}|>" for name in ("start", "channel", "constrain", "message"))
        start, channel, constrain, message = (encode(text, allowed_special="all")[0] for text in special)
        starts = [at for at, token in enumerate(ids) if token == start]
        rewritten: list[int] = []
        done = 0
        for one, at in zip(shown, starts, strict=False):
            if one.get("content_type") is None:
                continue
            to = f" to={one['recipient']}"
            newer = [start, *encode("assistant"), channel, *encode(f"{_COMMENTARY}{to} ")]
            newer += [constrain, *encode("json"), message]
            if ids[at : at + len(newer)] != newer:
                raise unsupported("oss-harmony's form of tool calls is unknown")
            rewritten += [*ids[done:at], start, *encode(f"assistant{to}"), channel]
            rewritten += [*encode(f"{_COMMENTARY} json"), message]
            done = at + len(newer)
        return rewritten + ids[done:]


def _developer(instructions: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> Message:
    content: dict[str, Any] = {"type": "developer_content", "instructions": instructions}
    if tools:
        named = [{**tool, "description": tool["description"] or ""} for tool in tools]
        content["tools"] = {"functions": {"name": "functions", "tools": named}}
    return {"role": "developer", "content": [content]}


def _shown(messages: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    calls = [objects(message.get("tool_calls") or [], "tool_calls") for message in messages]
    names = {call.get("id"): _called(call)[0] for each in calls for call in each}
    for message, called in zip(messages, calls, strict=True):
        texts = _texts(message.get("content"))
        text = "".join(texts or [])
        match message.get("role"):
            case "assistant":
                thought = message.get("reasoning")
                thought = "".join(
                    _texts(message.get("reasoning_content") if thought is None else thought) or []
                )
                said = [_said([text], _COMMENTARY) if called else _said(texts or [], _FINAL)] if text else []
                thoughts = [_said([thought], _ANALYSIS)] if thought else []
                yield from said + thoughts if called else thoughts + said
                for to, arguments in map(_called, called):
                    yield _said([arguments], _COMMENTARY, recipient=to, content_type="json")
            case "tool" if message.get("tool_call_id") in names:
                name, result = names[message["tool_call_id"]], _said([text], _COMMENTARY)
                yield {**result, "role": "tool", "name": name, "recipient": "assistant"}
            case "system" | "developer" if texts is not None:
                yield _developer(text)
            case "user":
                yield {**_said(texts or [""]), "role": "user"}
            case _:
                raise unsupported("gpt-oss has no such message")


def _said(texts: Sequence[str], channel: str | None = None, **fields: str) -> Message:
    """Return an assistant's message. Engines encode each of its texts separately."""
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": "assistant", "content": parts, "channel": channel, **fields}


def _without_old_analysis(shown: list[Message]) -> list[Message]:
    """Leave out the reasoning before the last answer."""
    last = max((at for at, one in enumerate(shown) if one.get("channel") == _FINAL), default=0)
    return [one for one in shown[:last] if one.get("channel") != _ANALYSIS] + shown[last:]


def _called(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return recipient and arguments of a call; only plain names have one form of header for certain."""
    match call.get("function"):
        case {"name": str() as name, "arguments": str() as arguments} if _FUNCTION.fullmatch(name):
            return f"functions.{name}", arguments
    raise unsupported("a call must have a plain name and arguments of text")


def _texts(content: object) -> list[str] | None:
    """Return a message's texts; None if it has none."""
    if isinstance(content, str | None):
        return None if content is None else [content]
    parts = content if isinstance(content, list) else [None]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") in _TEXT_TYPES and part.get("text")
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise unsupported("gpt-oss takes non-empty texts only")
    return texts or None
