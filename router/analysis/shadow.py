"""Simulation of other policies on the same requests: their picks, and a block cache for each pod.

Each policy has a cache per pod, as large as the pod's. It evicts like vLLM: the least recently used request
first, and of a request its end first. Together they hold at most `BLOCKS_MAX` blocks: in a larger fleet only
each second, fourth, ... block has an entry, then sessions are sampled, and the caches scaled alike. No I/O,
no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from indexer.keys import Keys

OURS, ROUND_ROBIN, LEAST_REQUESTS = "kvroute", "round_robin", "least_requests"
POLICIES = (OURS, ROUND_ROBIN, LEAST_REQUESTS)

BLOCKS_MAX = 256 * 1024  # about 40 MB
_GRAIN_MAX = 16
_ANSWERS_MAX, _ALIASES_MAX = 20_000, 100_000
_SESSIONS = 1 << 64


@dataclass(slots=True, eq=False)
class ShadowCache:
    """Blocks that one pod would hold. Requests in flight take a further block each for their last tokens."""

    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # least recently used first
    running: int = 0

    def begin(self, names: Sequence[int], servable: int, capacity: int) -> int:
        """Store the prompt's blocks; return how many of the first `servable` the cache had."""
        hits = next((at for at, name in enumerate(names[:servable]) if name not in self.blocks), servable)
        self.running += 1
        self._use(names, capacity)
        return min(hits, len(names))

    def end(self, names: Sequence[int], capacity: int) -> None:
        """Free the blocks of a prompt and its answer."""
        self.running -= 1
        self._use(names, capacity)

    def _use(self, names: Sequence[int], capacity: int) -> None:
        blocks = self.blocks
        for name in reversed(names):
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > max(0, capacity - self.running):
            blocks.popitem(last=False)


class Blocks(NamedTuple):
    """Prompt of a session as blocks of the index."""

    session: int
    keys: Keys
    prompt_tokens: int
    held_blocks: int  # prefix that any pod is known to have held
    engine_blocks: int = 1  # per block of the pods' engines


class Placed(NamedTuple):
    """Request in flight at its pod under each policy."""

    pods: Mapping[str, str]  # by policy
    sample: float  # share of sessions sampled when it began
    computed: Mapping[str, int] = MappingProxyType({})  # prompt tokens by policy; empty if not sampled
    session: int = 0
    prompt_tokens: int = 0
    grain: int = 1  # blocks of the index per block here
    keys: tuple[int, ...] = ()  # of the blocks here
    names: tuple[int, ...] = ()  # of the same blocks in the caches


class Shadow:
    """All policies' caches. Not thread-safe.

    The blocks of an answer are named when the request ends, although their keys are not known: a later prompt
    of the session that continues with blocks which some pod has held gives them their keys.
    """

    def __init__(self, block_tokens: int, blocks_max: int = BLOCKS_MAX) -> None:
        self._block_tokens, self._blocks_max = block_tokens, blocks_max
        self._caches: defaultdict[tuple[str, str], ShadowCache] = defaultdict(ShadowCache)
        self._requests: Counter[str] = Counter()  # in flight by pod, under least requests
        self._turns: Counter[str] = Counter()  # by model
        self._capacity_tokens: Mapping[str, int] = {}
        self._grain, self.sample = 1, 1.0
        # By session: last key and number of blocks of its last prompt, and the names of its answer's blocks.
        self._answers: OrderedDict[int, tuple[int, int, tuple[int, ...]]] = OrderedDict()
        self._aliases: OrderedDict[int, int] = OrderedDict()

    def resize(self, capacity_tokens: Mapping[str, int]) -> None:
        """Set the pods' cache sizes; pods without one are not followed."""
        if capacity_tokens == self._capacity_tokens:
            return
        self._capacity_tokens, grain = dict(capacity_tokens), 1
        blocks = len(POLICIES) * sum(capacity_tokens.values()) // self._block_tokens
        while blocks > grain * self._blocks_max and grain < _GRAIN_MAX:
            grain *= 2
        self._grain, self.sample = grain, min(1.0, grain * self._blocks_max / max(1, blocks))
        for policy, pod in [name for name in self._caches if name[1] not in capacity_tokens]:
            del self._caches[policy, pod]
        self._requests = Counter({pod: self._requests[pod] for pod in capacity_tokens})

    def begin(self, model: str, pods: Sequence[str], picked: str, prompt: Blocks) -> Placed:
        """Place a request by every policy and store its prompt; `picked` of `pods` was taken."""
        turn = self._turns[model] % len(pods)
        self._turns[model] += 1
        least = min((*pods[turn:], *pods[:turn]), key=lambda pod: self._requests[pod])
        self._requests[least] += 1
        placed = {OURS: picked, ROUND_ROBIN: pods[turn], LEAST_REQUESTS: least}
        is_sampled = prompt.session % _SESSIONS < self.sample * _SESSIONS
        if not is_sampled or not all(self._capacity_tokens.get(pod) for pod in placed.values()):
            return Placed(placed, self.sample)
        grain, (session, keys, prompt_tokens, held_blocks, _) = max(self._grain, prompt.engine_blocks), prompt
        block, ends = grain * self._block_tokens, tuple(keys[grain - 1 :: grain].tolist())
        names = self._named(session, ends, held_blocks // grain)
        computed = {}
        for policy, pod in placed.items():
            cache, servable = self._caches[policy, pod], (prompt_tokens - 1) // block
            computed[policy] = prompt_tokens - block * cache.begin(names, servable, self._room(pod, grain))
        return Placed(placed, self.sample, computed, session, prompt_tokens, grain, ends, names)

    def end(self, placed: Placed, output_tokens: int) -> None:
        """End a request, with `output_tokens` of an answer."""
        least, grain = placed.pods[LEAST_REQUESTS], placed.grain
        self._requests[least] = max(0, self._requests[least] - 1)
        answer: tuple[int, ...] = ()
        if placed.keys:
            # The last token of an answer is never computed.
            full = (placed.prompt_tokens + max(0, output_tokens - 1)) // (grain * self._block_tokens)
            last, length = placed.keys[-1], len(placed.keys)
            answer = tuple(hash((placed.session, last, at)) for at in range(length, full))
            self._answers[placed.session] = last, length, answer
            _trim(self._answers, _ANSWERS_MAX)
        for policy, pod in placed.pods.items() if placed.computed else ():
            if (cache := self._caches.get((policy, pod))) is not None:
                cache.end((*placed.names, *answer), self._room(pod, grain))

    def _named(self, session: int, ends: tuple[int, ...], held: int) -> tuple[int, ...]:
        """Return the names of blocks: their keys, or the names that they got as an answer."""
        last, length, answer = self._answers.get(session, (0, 0, ()))
        if 0 < length <= len(ends) and ends[length - 1] == last:
            self._aliases |= zip(ends[length:held], answer, strict=False)
            _trim(self._aliases, _ALIASES_MAX)
        return tuple(map(self._aliases.get, ends, ends))

    def _room(self, pod: str, grain: int) -> int:
        return int(self._capacity_tokens.get(pod, 0) * self.sample) // (grain * self._block_tokens)


def _trim(entries: OrderedDict[Any, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
