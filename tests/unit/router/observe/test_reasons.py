"""Documentation of the reasons for picks without a prompt's tokens."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

# Forms of a reason in the code: an argument of `unknown`, a return value without keys, or a constant.
_USED = (
    r'unknown\(request, "(\w+)"\)',
    r'return \[\], (?:\w+(?:\.\w+)* or )?"(\w+)"',
    r'^(?:LONGER_THAN_CONTEXT|TOO_MANY_PROMPTS|MEDIA|CACHE_NOT_READ) = "(\w+)"',
)


def test_every_reason_is_documented() -> None:
    """The operator's guide lists exactly the reasons that the code uses."""
    sources = [path.read_text("utf-8") for path in (ROOT / "router").rglob("*.py")]
    used = {name for text in sources for form in _USED for name in re.findall(form, text, re.MULTILINE)}
    assert {"unsupported_prompt", "tokenize_deadline", "too_many_prompts", "media", "no_model"} <= used
    guide = (ROOT / "docs/operations.md").read_text("utf-8")
    section = guide.partition("## Picks without a prompt's tokens")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"degraded"}
    assert documented == used - {"media"}
    assert '`partial` "media"' in section
