"""Number of examples per property test: few in `make test-fast`, many in `make test-deep`."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return the number of examples that a property with `count` of them in a normal run gets now."""
    return max(1, count * settings.default.max_examples // 100)
