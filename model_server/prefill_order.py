"""Which prefill comes next, and how fast prefills are.

In: requests with their arrival and the tokens that they still have to compute. Out: keys to sort them by, the
least first. Pure: times are arguments. Routers that count the work ahead of a request use the same rule.
"""

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TypeAlias

from model_server.config import SchedulingPolicy
from model_server.live_request import LiveRequest

AGE_FACTOR = 10.0
PARTIAL_PROMPTS_MAX = 2

# Least first; of equals the one that was submitted first.
OrderKey: TypeAlias = tuple[float, float, int]

# A shorter prefill takes as long as any step: its speed would make an engine that has had nothing else look
# many times slower than its equals, and routers would send it nothing that could tell otherwise.
_TOKENS_MIN = 128
_STEPS = 64
_STEPS_MIN = 4


def order_key(policy: SchedulingPolicy, seconds_per_token: float) -> Callable[[LiveRequest], OrderKey]:
    """Return the key of a policy.

    Args:
        policy: "fcfs" by arrival; "priority" by the request's priority, then arrival; "aged" by arrival plus
            ten times the seconds that its own prefill still takes, so that short prompts overtake long ones
            and whoever waits long enough is overtaken no more.
        seconds_per_token: How long a prompt token takes here; 0 while that is unknown.
    """

    def fcfs(live: LiveRequest) -> OrderKey:
        return 0.0, live.arrived_s, live.serial

    def priority(live: LiveRequest) -> OrderKey:
        return live.request.priority, live.arrived_s, live.serial

    def aged(live: LiveRequest) -> OrderKey:
        own_s = live.uncached * seconds_per_token
        return 0.0, live.arrived_s + AGE_FACTOR * own_s, live.serial

    return {"fcfs": fcfs, "priority": priority, "aged": aged}[policy]


class PrefillRate:
    """The speed of prefills: the median of the last steps, which a slow start or a stall does not move."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._seconds_per_token = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second; 0 before there were enough prefills to tell."""
        return 1.0 / self._seconds_per_token if self._seconds_per_token else 0.0

    @property
    def seconds_per_token(self) -> float:
        """The inverse; 0 before there were enough prefills to tell."""
        return self._seconds_per_token

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Take one step; one of few prompt tokens, or of mostly decodes, tells nothing of prefills."""
        if prefill_tokens < _TOKENS_MIN or prefill_tokens <= decode_tokens or seconds <= 0.0:
            return
        self._steps.append(seconds / prefill_tokens)
        if len(self._steps) >= _STEPS_MIN:
            self._seconds_per_token = median(self._steps)
