"""Writes this process's views into the shared index: one owner for each pod, by lease.

Replicas that follow the same pod all come here with the same events, but only the owner of the pod's lease
writes; to the others a write does nothing. When an owner falls silent another one takes over, with a new,
empty life of the pod: it cannot know which events the old one had got to. The same is done after a write that
failed, since nobody knows how far it came. Such a pod is *lost*: its view must be built anew from its engine.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis import Redis

from indexer import redis_scripts
from indexer.errors import UnavailableError
from indexer.keys import Keys, utf8
from indexer.redis_link import RedisLink, RedisMetrics

_log = logging.getLogger(__name__)

# Of one script, about 4 ms: the server does nothing else meanwhile.
WRITE_BLOCKS = 512
_RENEW_PODS = 256
# A cleared pod's blocks are swept out at once up to here; the rest follows in the background.
_SWEEP_AT_ONCE_BLOCKS = 16_384
_SWEEPS_PER_BEAT = 16
# So long after its lease ended a view may still be taken up where it was left.
_GRACE_MS = 60_000

# Instead of a life's number: another process keeps the view up; ours is not to be trusted.
_STANDBY = 0
_DOUBTFUL = -1


class RedisWriter:
    """All writes of one process. Thread-safe; writes wait for each other.

    Args:
        link: Where it writes.
        prefix: Of all names, see `redis_scripts`.
        capacity_blocks: Most blocks.
        lease_s: So long a view counts without a sign of life of its owner.
        ttl_s: Life of a block that is neither stored nor matched again.
        metrics: Where lost views are counted.
    """

    def __init__(
        self,
        link: RedisLink,
        *,
        prefix: str,
        capacity_blocks: int,
        lease_s: float,
        ttl_s: float,
        metrics: RedisMetrics,
    ) -> None:
        self._link = link
        self._prefix = prefix
        self._capacity_blocks = capacity_blocks
        self._lease_ms = int(lease_s * 1000)
        self._ttl_s = max(1, int(ttl_s))
        self._metrics = metrics
        self._owner = secrets.token_hex(8)
        self._lock = threading.RLock()
        # Pod -> the life that we write to, or why we do not.
        self._views: dict[str, int] = {}
        self._lost: dict[str, None] = {}
        self._add = link.client.register_script(redis_scripts.ADD)
        self._remove = link.client.register_script(redis_scripts.REMOVE)
        self._clear = link.client.register_script(redis_scripts.CLEAR)
        self._renew = link.client.register_script(redis_scripts.RENEW)
        self._release = link.client.register_script(redis_scripts.RELEASE)
        self._sweep = link.client.register_script(redis_scripts.SWEEP)
        self._touch = link.client.register_script(redis_scripts.TOUCH)
        self._evict = link.client.register_script(redis_scripts.EVICT)

    @property
    def lock(self) -> threading.RLock:
        """Held during each write; whoever holds it sees no write of this process."""
        return self._lock

    def life(self, pod: str) -> int:
        """The life of the pod that this process keeps up; 0 for none.

        Raises:
            UnavailableError: A write failed, and the view could not begin anew yet.
        """
        if self._views.get(pod) == _DOUBTFUL:
            raise UnavailableError("doubtful")
        return self._mine(pod)

    def take_lost(self) -> tuple[str, ...]:
        """Pods whose view must be built anew from their engine; each is told once for each time."""
        with self._lock:
            lost = tuple(self._lost)
            self._lost.clear()
        return lost

    def add(self, pod: str, tier: int, keys: Keys, references: NDArray[np.int32] | None) -> int:
        """Adds references, of too long a call only the first; tells how many blocks there are then."""
        kept = min(len(keys), self._capacity_blocks)
        blocks = 0
        with self._lock:
            for start, end in _from_the_end(kept):
                counts = b"" if references is None else references[start:end].astype("<u4").tobytes()
                chunk = _packed(keys[start:end])
                reply = self._write(pod, self._add, self._ttl_s, tier, self._capacity_blocks, chunk, counts)
                if reply is None:
                    return 0
                blocks = reply
            if kept < len(keys):
                self._call(
                    lambda client: client.hincrby(self._prefix + "meta", "evicted", len(keys) - kept), 0
                )
        return blocks

    def remove(self, pod: str, tier: int, keys: Keys) -> int:
        """Takes references away; tells how many holdings ended."""
        ended = 0
        with self._lock:
            for start in range(0, len(keys), WRITE_BLOCKS):
                chunk = _packed(keys[start : start + WRITE_BLOCKS])
                reply = self._write(pod, self._remove, self._ttl_s, tier, chunk)
                if reply is None:
                    break
                ended += reply
        return ended

    def clear(self, pod: str) -> int:
        """Begins a new life of the pod; tells how many blocks the old one held."""
        with self._lock:
            if pod not in self._views or (reply := self._run(pod, self._clear)) is None:
                return 0
            life, _, blocks = reply
            if life:
                self._views[pod] = life
            else:
                # Whatever comes now is whole again: nothing was passed over in this life.
                del self._views[pod]
            self._lost.pop(pod, None)
            left = _SWEEP_AT_ONCE_BLOCKS if blocks else 0
            while left > 0 and (swept := self._sweep_some()):
                left -= swept
        return blocks

    def evict(self, blocks: int) -> int:
        """Drops the least recently used blocks; tells how many."""
        dropped = 0
        while dropped < blocks:
            chunk = min(blocks - dropped, WRITE_BLOCKS)
            with self._lock:
                turn = self._call(self._scripted(self._evict, chunk), 0)
            if not turn:
                break
            dropped += turn
        return dropped

    def touch(self, keys: Sequence[int]) -> None:
        """These blocks were used, the last one most recently."""
        packed = np.array(keys, np.uint64)
        for start in range(0, len(packed), WRITE_BLOCKS):
            chunk = _packed(packed[start : start + WRITE_BLOCKS])
            self._call(self._scripted(self._touch, self._ttl_s, chunk), None)

    def renew(self) -> None:
        """Renews all leases, takes views over that nobody keeps up, and begins doubtful ones anew."""
        with self._lock:
            pods = list(self._views)
        for start in range(0, len(pods), _RENEW_PODS):
            with self._lock:
                chunk = [pod for pod in pods[start : start + _RENEW_PODS] if pod in self._views]
                arguments: list[bytes | int] = []
                for pod in chunk:
                    arguments += (utf8(pod), self._mine(pod))
                renew = self._scripted(self._renew, self._owner, self._lease_ms, self._ttl_s, *arguments)
                answer = self._call(renew, None)
                if answer is None:
                    return
                for pod, life, new in zip(chunk, answer[::2], answer[1::2], strict=True):
                    if life < 0:
                        del self._views[pod]
                    else:
                        self._claimed(pod, life, new)

    def sweep(self) -> None:
        """Sweeps out what was left of dead lives, a bounded part of it."""
        for _ in range(_SWEEPS_PER_BEAT):
            with self._lock:
                if not self._sweep_some():
                    return

    def release(self) -> None:
        """Ends all leases, so that others need not wait for them to run out."""
        with self._lock:
            owned = [utf8(pod) for pod in self._views if self._mine(pod)]
            for start in range(0, len(owned), _RENEW_PODS):
                chunk = owned[start : start + _RENEW_PODS]
                self._call(self._scripted(self._release, self._owner, *chunk), None)
            self._views.clear()

    def _write(self, pod: str, script: Any, *arguments: str | int | bytes) -> int | None:
        """Runs a script that writes to the pod's view; None if nobody knows whether it did."""
        reply = self._run(pod, script, *arguments)
        if reply is None:
            return None
        self._claimed(pod, reply[0], reply[1])
        return reply[2]

    def _run(self, pod: str, script: Any, *arguments: str | int | bytes) -> tuple[int, int, int] | None:
        run = self._scripted(script, utf8(pod), self._owner, self._mine(pod), self._lease_ms, *arguments)
        reply = self._call(run, None)
        if reply is None:
            self._views[pod] = _DOUBTFUL
            return None
        return int(reply[0]), int(reply[1]), int(reply[2])

    def _mine(self, pod: str) -> int:
        return max(0, self._views.get(pod, _STANDBY))

    def _claimed(self, pod: str, life: int, new: int) -> None:
        lost = new and pod in self._views
        self._views[pod] = life
        if lost:
            self._lost[pod] = None
            self._metrics.views_lost.inc()
            _log.warning("shared view of %s begins anew", pod)

    def _sweep_some(self) -> int:
        return int(self._call(self._scripted(self._sweep, self._ttl_s, _GRACE_MS, WRITE_BLOCKS), 0))

    def _scripted(self, script: Any, *arguments: str | int | bytes) -> Callable[[Redis], Any]:
        return lambda client: script(keys=[self._prefix], args=arguments, client=client)

    def _call(self, command: Callable[[Redis], Any], otherwise: Any) -> Any:
        try:
            return self._link.call(command)
        except UnavailableError:
            return otherwise


def _from_the_end(blocks: int) -> Iterator[tuple[int, int]]:
    """Chunks, the last one first: within one call the earlier keys shall be the more recent ones."""
    for end in range(blocks, 0, -WRITE_BLOCKS):
        yield max(0, end - WRITE_BLOCKS), end


def _packed(keys: Keys) -> bytes:
    return keys.astype("<u8").tobytes()
