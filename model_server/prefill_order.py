"""Which prefill comes next, and how fast prefills are.

In: requests with their arrival and the tokens that they still have to compute. Out: keys to sort them by, the
least first. Pure: times are arguments. Routers that count the work ahead of a request use the same rule.
"""

from collections.abc import Callable
from typing import TypeAlias

from model_server.config import SchedulingPolicy
from model_server.live_request import LiveRequest

AGE_FACTOR = 10.0
PARTIAL_PROMPTS_MAX = 2

# Least first; of equals the one that was submitted first.
OrderKey: TypeAlias = tuple[float, float, int]

_HALF_LIFE_TOKENS = 16_384


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
    """The speed of prefills, measured over the last tens of thousands of tokens."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second; 0 before the first prefill."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def seconds_per_token(self) -> float:
        """The inverse; 0 before the first prefill."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Take one step; one of mostly decodes tells nothing of prefills."""
        if prefill_tokens <= decode_tokens or seconds <= 0.0:
            return
        kept = 0.5 ** (prefill_tokens / _HALF_LIFE_TOKENS)
        self._tokens = self._tokens * kept + prefill_tokens
        self._seconds = self._seconds * kept + seconds
