"""Hashes of the parts of a request's prompt: session id, system prompt, tools, messages. Keeps no text."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.prompts.request import RequestKind, RouteRequest, session_of

_MESSAGES_MAX = 4096  # further messages of a request are not read
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
# Mark that clients of Anthropic's API move from message to message; it changes no token.
_MARK = b"cache_control"
# Field of the messages, and of the system prompt outside of them, by API.
_FIELDS = {
    RequestKind.CHAT: ("messages", ""),
    RequestKind.MESSAGES: ("messages", "system"),
    RequestKind.RESPONSES: ("input", "instructions"),
}


class _Message(msgspec.Struct):
    role: Any = None


_MESSAGE = msgspec.json.Decoder(_Message)


class Parts(NamedTuple):
    """Hashes of a prompt's parts, by Python's hash, which differs from process to process."""

    session: int = 0  # of the session id that the client sent; 0: none
    system: int = 0
    tools: int = 0
    messages: NDArray[np.int64] = np.zeros(0, np.int64)  # in their order, a system message included
    first_user: int = 0  # 0: there is no user message
    is_system_first: bool = False  # whether the system prompt is the first message


def read_parts(request: RouteRequest) -> Parts:
    """Return the hashes of a request's parts; there are no messages where the API has none.

    Raises:
        msgspec.MsgspecError, RecursionError: The body is not what the API demands.
    """
    body = request.body
    field, outside = _FIELDS.get(request.kind, ("", ""))
    value, metadata = body.get(field), body.get("metadata")
    raw = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
    if _MARK in raw:
        raw = msgspec.json.encode(msgspec.json.decode(raw))  # written as the rest of a marked message
    items = _ITEMS.decode(raw)[:_MESSAGES_MAX] if raw.startswith(b"[") else []
    messages = [hash(_unmarked(bytes(item))) for item in items]
    roles = [_MESSAGE.decode(item).role for item in items[:8]]
    is_system_first = roles[:1] in (["system"], ["developer"])
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    session = session_of(request) or user
    return Parts(
        hash(msgspec.json.encode(session)) if session else 0,
        messages[0] if is_system_first else hash(_unmarked(msgspec.json.encode(body.get(outside)))),
        hash(_unmarked(msgspec.json.encode(body.get("tools")))),
        np.array(messages, np.int64),
        messages[roles.index("user")] if "user" in roles else 0,
        is_system_first,
    )


def shown_digest(data: bytes, key: bytes) -> str:
    """Return a digest for operators, which tells nothing of the data without the key of up to 64 bytes."""
    return blake2b(data, digest_size=8, key=key).hexdigest()


def _unmarked(text: bytes) -> bytes:
    """Return JSON of a part without marks."""
    if _MARK not in text:
        return text
    value = msgspec.json.decode(text)
    for block in value if isinstance(value, list) else (value,):
        content = block.get("content") if isinstance(block, dict) else None
        for marked in (block, *(content if isinstance(content, list) else ())):
            if isinstance(marked, dict):
                marked.pop(_MARK.decode(), None)
    return msgspec.json.encode(value)
