"""When to try again to get what a STALE view lacks: after a pause, and after longer and longer ones.

Time comes in, and when the next attempt is due goes out; this module knows nothing of the attempts. Pauses
are drawn a little at random, so that many views that broke together are not mended all at once.
"""

from __future__ import annotations

import math
import random

# The first pause at most, and the last.
_FIRST_S = 30.0
_LAST_S = 600.0


class Healing:
    """The pauses of one view.

    Attributes:
        due_s: When to try; infinity: not at all.
    """

    def __init__(self) -> None:
        self.due_s = math.inf
        self._pause_s = _FIRST_S

    def plan(self, now_s: float) -> None:
        """Plans the next attempt, unless one is planned."""
        if self.due_s == math.inf:
            self.due_s = now_s + self._pause_s * random.uniform(0.5, 1.0)
            self._pause_s = min(2 * self._pause_s, _LAST_S)

    def cancel(self) -> None:
        """Plans none for now."""
        self.due_s = math.inf

    def healed(self) -> None:
        """Nothing lacks any more: the pauses begin anew."""
        self.due_s, self._pause_s = math.inf, _FIRST_S
