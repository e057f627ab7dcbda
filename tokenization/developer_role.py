"""The role `developer` where a chat template does not know it: messages in, system messages out.

As vLLM's server does: every developer's message becomes the system's, and all of the system's become one, in
front. Knows no templates beyond whether they name the role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DEVELOPER, _SYSTEM = "developer", "system"


def names_developer(source: str) -> bool:
    """Whether a template's source names the role; engines look for it in quotes."""
    return '"developer"' in source or "'developer'" in source


def has_developer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the messages is a developer's."""
    return _DEVELOPER in [message["role"] for message in messages]


def as_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a developer's as the system's, and these in front as one."""
    turned = [_turned(message) for message in messages]
    system = [message for message in turned if message["role"] == _SYSTEM]
    if system == turned[:1]:
        return turned
    texts = [text for message in system if (text := _text(message.get("content")))]
    others = [message for message in turned if message["role"] != _SYSTEM]
    return [{"role": _SYSTEM, "content": "\n\n".join(texts)}, *others]


def _turned(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] != _DEVELOPER:
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": _SYSTEM}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join([part["text"] for part in content if "text" in part])
    return content if isinstance(content, str) else ""
