"""Number of examples of a property: `make test-fast` has few of them, `make test-deep` many."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return the number of examples that a property with `count` of them in a normal run gets now."""
    return max(1, count * settings.default.max_examples // 100)
