"""Model of an engine's prefix cache: vLLM's block pool with copies, a free queue, chunks and a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BLOCK = 2
"""Tokens per block."""
Prompt = tuple[int, ...]
_CHUNK_BLOCKS = 2


@dataclass(eq=False)
class _Block:
    """Physical block; without a prefix it is not cached."""

    prefix: Prompt | None = None
    users: int = 0


@dataclass(eq=False)
class _Request:
    tokens: Prompt
    prompt_tokens: int
    blocks: list[_Block]
    computed_blocks: int


class LruEngine:
    """Engine whose least recently used blocks are evicted, and whose events are collected.

    Args:
        capacity: Blocks, of which one never holds anything.
        drops: Whether the last matched block of each hit is dropped.
    """

    def __init__(self, capacity: int, *, drops: bool) -> None:
        self.running: dict[int, _Request] = {}
        self._drops = drops
        self._free = [_Block() for _ in range(capacity - 1)]
        self._cached: dict[Prompt, list[_Block]] = {}
        self._events: list[dict[str, Any]] = []
        self._started = 0

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken

    def act(self, choice: int, prompt: Prompt) -> None:
        """Start a request, or let a running one compute a chunk, decode a token, or end."""
        numbers = list(self.running)
        if choice < 3 or not numbers:
            self.start(prompt)
        elif choice < 7:
            self.step(numbers[len(prompt) % len(numbers)], prompt[0])
        else:
            self.finish(numbers[len(prompt) % len(numbers)])

    def run(self, prompt: Prompt) -> None:
        """Compute a prompt from start to end."""
        number = self.start(prompt)
        while number in self.running and self.running[number].computed_blocks < len(prompt) // BLOCK:
            self.step(number, 1)
        self.finish(number)

    def held_blocks(self, prompt: Prompt) -> int:
        """Return how many leading blocks of a prompt are cached."""
        held = 0
        while (held + 1) * BLOCK <= len(prompt) and prompt[: (held + 1) * BLOCK] in self._cached:
            held += 1
        return held

    def start(self, prompt: Prompt) -> int:
        """Look a prompt up and compute its first chunk."""
        # The last token is always computed.
        hit = self.held_blocks(prompt[:-1])
        hit = max(0, hit - self._drops)
        blocks = [self._cached[prompt[: (each + 1) * BLOCK]][0] for each in range(hit)]
        for block in blocks:
            if not block.users:
                self._free.remove(block)
            block.users += 1
        self._started += 1
        self.running[self._started] = _Request(prompt, len(prompt), blocks, hit)
        self._compute(self._started)
        return self._started

    def step(self, number: int, token: int) -> None:
        """Compute the next chunk of a prompt, or decode a token."""
        request = self.running[number]
        if request.computed_blocks >= request.prompt_tokens // BLOCK:
            request.tokens = (*request.tokens, token)
        self._compute(number)

    def finish(self, number: int) -> None:
        """Free a request's blocks, the last one first; those that are not cached are used first."""
        request = self.running.pop(number, None)
        for block in reversed(request.blocks if request else []):
            block.users -= 1
            if not block.users and block.prefix is None:
                self._free.insert(0, block)
            elif not block.users:
                self._free.append(block)

    def _compute(self, number: int) -> None:
        request = self.running[number]
        first = request.computed_blocks
        end = min(first + _CHUNK_BLOCKS + 1, len(request.tokens) // BLOCK)
        has_partial = end * BLOCK < len(request.tokens)
        while len(request.blocks) < end + has_partial:
            if not self._free:
                self.finish(number)
                return
            request.blocks.append(self._allocate())
        request.computed_blocks = end
        if first == end:
            return
        for each in range(first, end):
            prefix = request.tokens[: (each + 1) * BLOCK]
            request.blocks[each].prefix = prefix
            self._cached.setdefault(prefix, []).append(request.blocks[each])
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [_hash(request.tokens[: (each + 1) * BLOCK]) for each in range(first, end)],
                "parent_block_hash": _hash(request.tokens[: first * BLOCK]) if first else None,
                "token_ids": list(request.tokens[first * BLOCK : end * BLOCK]),
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
            }
        )

    def _allocate(self) -> _Block:
        block = self._free.pop(0)
        if block.prefix is not None:
            copies = self._cached[block.prefix]
            copies.remove(block)
            if not copies:
                del self._cached[block.prefix]
            removal = {"type": "BlockRemoved", "block_hashes": [_hash(block.prefix)], "medium": "GPU"}
            self._events.append(removal)
            block.prefix = None
        block.users = 1
        return block


def _hash(prefix: Prompt) -> int:
    return hash(prefix) & 0xFFFF_FFFF_FFFF_FFFF
