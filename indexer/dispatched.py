"""What a router tells of a request that it sent to a pod, so that the pod's events can be held against it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray


class DispatchKey(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One sending of a request: clients use an id again, also while its first use is in flight."""

    request_id: str
    dispatched_s: float

    def __str__(self) -> str:
        return self.request_id


@dataclass(frozen=True, slots=True)
class DispatchedPrompt:
    """A prompt as we see it; the pod should see the same."""

    model: str
    lora_name: str | None  # the adapter's name; None for the base model
    cache_salt: str | None
    token_ids: NDArray[np.uint32]
    cached_blocks: int  # blocks of it that the pod was said to hold
    held_blocks: int = 0  # so many of these the pod itself has told of; the others are assumed
