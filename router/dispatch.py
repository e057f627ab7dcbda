"""One sending of a request to a pod, and what the ledger tells of it. Plain values; no I/O and no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from indexer.parity import DispatchKey
from router.rates import Lesson


class Dispatch(msgspec.Struct, frozen=True):
    """One request sent to one pod.

    Attributes:
        uncached_tokens: Prompt tokens the pod has to compute.
        confirm_key: Key of the last block it will compute: when the pod announces it, the prefill is over.
            None where no such announcement is to be expected.
        lesson: What the time to its first token tells of the pod's prefill rate.
        decoding: Requests that decoded on the pod that prefills it, others' among them.
        prefill_pod: Where it is prefilled, if `pod` only decodes it; the numbers are that pod's then.
        adapter: The LoRA adapter that it needs.
        promised_tokens: Prompt tokens that `pod` should find in its cache; 0 where that is not known well.
    """

    request_id: str
    pod: str
    uncached_tokens: int
    queued_prefill_s: float
    own_prefill_s: float
    confirm_key: int | None
    lesson: Lesson
    dispatched_s: float
    decoding: int = 0
    prefill_pod: str | None = None
    adapter: str | None = None
    promised_tokens: int = 0

    @property
    def computed_on(self) -> str:
        """The pod that prefills it."""
        return self.prefill_pod or self.pod

    @property
    def key(self) -> DispatchKey:
        """What tells it apart from others of its id."""
        return DispatchKey(self.request_id, self.dispatched_s)


@dataclass(frozen=True, slots=True)
class Announced:
    """Requests whose last prompt block was announced.

    Attributes:
        prefills: Those whose prefill this ends.
        late_s: Of each of the others, how long ago somebody else told that its prefill was over.
    """

    prefills: list[Dispatch] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Expired:
    """Requests whose prefill, and requests whose life, is over by the clock alone."""

    prefills: list[Dispatch] = field(default_factory=list)
    lives: list[Dispatch] = field(default_factory=list)


class InFlight(msgspec.Struct, frozen=True):
    """An entry of the ledger, as others are told of it.

    Attributes:
        number: No other entry ever has it.
        has_left_queue: Whether it is believed to have its first token.
    """

    number: int
    dispatch: Dispatch
    has_left_queue: bool


class Entry(msgspec.Struct, eq=False):
    """An entry of the ledger: a request in flight, where, and since when.

    Attributes:
        number: Its ticket on the board; no other entry ever has it.
        is_waiting: Whether it is believed to await its first token.
        confirm_key: Of the dispatch, until it is announced.
        promised_tokens: Of the dispatch, until they are due, or it is over.
        prefill_ended_s: When somebody told so; the clock does not count.
    """

    dispatch: Dispatch
    number: int
    pod: str
    arrived_s: float
    confirm_key: int | None
    promised_tokens: int
    is_waiting: bool = True
    prefill_ended_s: float | None = None
