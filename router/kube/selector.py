"""Label selectors as the API server reads them: text or matchLabels in, checked text out. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}"
_VALUE = rf"(?:{_NAME})?"
_REQUIREMENT = re.compile(
    rf"\s*(?:!\s*{_KEY}|{_KEY}\s*(?:(?:==?|!=)\s*{_VALUE}|\s(?:not)?in\s*\(\s*{_VALUE}\s*(?:,\s*{_VALUE}\s*)*\))?)\s*"
)
_COMMA = re.compile(r",(?![^(]*\))")
_CHARS_MAX = 8192


def checked_selector(text: str) -> str:
    """A selector in Kubernetes' text form: `a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`.

    Raises:
        ValueError: It is none, or would select every pod.
    """
    if len(text) > _CHARS_MAX:
        raise ValueError(f"longer than {_CHARS_MAX} characters")
    for part in _COMMA.split(text):
        if not _REQUIREMENT.fullmatch(part):
            raise ValueError(
                f"{part.strip()!r} is no requirement; write app=x, role!=y, role in (a,b), role notin (a), "
                "app or !app"
            )
    return text.strip()


def selector_of(labels: Mapping[str, str]) -> str:
    """The text form of matchLabels.

    Raises:
        ValueError: A label is none, or there are none: that would select every pod.
    """
    if not labels:
        raise ValueError("is empty, which would select every pod of the namespace")
    return checked_selector(",".join(f"{key}={value}" for key, value in sorted(labels.items())))
