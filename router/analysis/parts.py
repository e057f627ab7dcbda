"""Parts of a request's prompt as keyed digests: session id, system prompt, tools, messages. Keeps no text."""

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
    """Keyed 64-bit digests of a prompt's parts; 0 stands for a part that is absent."""

    session: int = 0  # of the session id that the client sent
    system: int = 0
    tools: int = 0
    messages: NDArray[np.uint64] = np.zeros(0, np.uint64)  # in their order, a system message included
    first_user: int = 0
    is_system_first: bool = False  # whether the system prompt is the first message


def read_parts(request: RouteRequest, key: bytes) -> Parts:
    """Return the digests of a request's parts; there are no messages where the API has none.

    Args:
        key: Secret of up to 64 bytes, without which a digest tells nothing of the text.

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
    messages = [_digest(item, key) for item in items]
    roles = [_MESSAGE.decode(item).role for item in items[:8]]
    is_system_first = roles[:1] in (["system"], ["developer"])
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    session, tools = session_of(request) or user, body.get("tools")
    return Parts(
        _digest(msgspec.json.encode(session), key) if session else 0,
        messages[0] if is_system_first else _digest(msgspec.json.encode(body.get(outside)), key),
        _digest(msgspec.json.encode(tools), key) if tools else 0,
        np.array(messages, np.uint64),
        messages[roles.index("user")] if "user" in roles else 0,
        is_system_first,
    )


def shown_digest(data: bytes, key: bytes) -> str:
    """Return a keyed digest as text."""
    return blake2b(data, digest_size=8, key=key).hexdigest()


def _digest(raw: bytes | msgspec.Raw, key: bytes) -> int:
    text = bytes(raw)
    if _MARK in text:
        value = msgspec.json.decode(text)
        for block in value if isinstance(value, list) else (value,):
            content = block.get("content") if isinstance(block, dict) else None
            for marked in (block, *(content if isinstance(content, list) else ())):
                if isinstance(marked, dict):
                    marked.pop(_MARK.decode(), None)
        text = msgspec.json.encode(value)
    return int(shown_digest(text, key), 16)
