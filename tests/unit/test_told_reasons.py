"""Every reason for a pick without tokens is one that the operator can read about."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Where a reason is given: to `unknown`, beside keys that are none, or by a name of its own.
_GIVEN = (
    r'unknown\(request, "(\w+)"\)',
    r'return \[\], (?:\w+(?:\.\w+)* or )?"(\w+)"',
    r'^(?:LONGER_THAN_CONTEXT|TOO_MANY_PROMPTS|MEDIA|CACHE_NOT_READ) = "(\w+)"',
)


def test_every_reason_is_documented() -> None:
    """A reason that the code gives stands in the operator's guide, and the guide names no other."""
    sources = [path.read_text("utf-8") for path in (ROOT / "router").rglob("*.py")]
    given = {name for text in sources for form in _GIVEN for name in re.findall(form, text, re.MULTILINE)}
    assert {"unsupported_prompt", "tokenize_deadline", "too_many_prompts", "media", "no_model"} <= given
    guide = (ROOT / "docs/operations.md").read_text("utf-8")
    section = guide.partition("## Picks without a prompt's tokens")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"degraded"}
    assert told == given - {"media"}
    assert '`partial` "media"' in section
