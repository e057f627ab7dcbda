"""Views that an index outside the process lost: asks for them once a second and has them built anew.

Runs on the subscriber's thread only; knows neither the index nor the streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

_EVERY_S = 1.0


class Losses:
    """What was lost, until it is being built anew.

    Args:
        take: Tells the names in the index that lost their blocks since it was last asked.
        doubt: Told a name and the time, has that engine's view built anew; answers False where it is to be
            told again later, since the view is just being built.
    """

    name = "losses"

    def __init__(self, take: Callable[[], Collection[str]], doubt: Callable[[str, float], bool]) -> None:
        self._take = take
        self._doubt = doubt
        self._waiting: set[str] = set()
        self.due_s = -math.inf

    def tick(self, now_s: float) -> None:
        """Does what is due."""
        self.due_s = now_s + _EVERY_S
        self._waiting |= {*self._take()}
        self._waiting = {name for name in self._waiting if not self._doubt(name, now_s)}

    def reset(self, now_s: float) -> None:
        """Begins anew after an error of our own."""
        self.due_s = now_s + _EVERY_S

    def close(self) -> None:
        """Ends it."""
