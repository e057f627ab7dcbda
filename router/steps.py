"""Work in steps: generators that end one at each `yield`, taken alone, or together with others of their kind.

What all requests need of code and state is more than a core's second cache holds. So where several are at
hand, each takes a step before any takes the next one, and finds in the caches what the one before it has
brought there (Harizopoulos and Ailamaki, "STEPS towards cache-resident transaction processing", VLDB 2004).
Knows no requests.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")

GOES_ON, MAY_WAIT = False, True
"""What a step ends with: whether the next one may wait for something, and so hold up whoever goes along."""

# It yields one of these, and returns what it was made for.
Steps = Generator[bool, None, _T]

AT_ONCE_MAX = 8
"""Of more that go along the caches hold less, and the first ones wait for longer."""

AT_ONCE_BYTES = 64 << 10
"""So many bytes of requests are a few milliseconds' work."""


def alone(steps: Steps[_T]) -> _T:
    """Takes all steps, waiting where they wait."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: _T = end.value
        return result
