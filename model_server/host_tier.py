"""The second tier of the KV cache, in host memory: which slot holds what, and which is reused next.

In: contents that are to be kept, found, held and let go. Out: slots, and the events that follow. Knows no
tensors and no streams: who copies says when a copy is done. Nothing can be found before its copy is there.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from model_server.block_content import Announcer, BlockContent, ContentKey, runs
from model_server.events import MEDIUM_CPU, KVEvent


class HostBlock:
    """One slot of host memory.

    Attributes:
        slot: Row of the host tensors.
        content: What can be found in it; None for a swapped block, which is its request's own.
        holders: Copies under way into or out of it, and requests that are swapped out; it stays while
            there are any.
        ready: Whether the copy into it is done.
    """

    __slots__ = ("content", "holders", "ready", "slot")

    def __init__(self, slot: int, content: BlockContent | None) -> None:
        self.slot = slot
        self.content = content
        self.holders = 1
        self.ready = False


class HostTier:
    """A fixed number of slots, least recently used first out.

    Args:
        num_blocks: Slots; 0 for no such tier.
        announcer: Writes its events.
        announce: Takes them, in order.
    """

    def __init__(self, num_blocks: int, announcer: Announcer, announce: Callable[[KVEvent], None]) -> None:
        self.num_blocks = num_blocks
        self._announcer = announcer
        self._announce = announce
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[ContentKey, HostBlock] = OrderedDict()  # least recently used first
        self._swapped: set[HostBlock] = set()

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return self.num_blocks - len(self._free)

    def find(self, key: ContentKey) -> HostBlock | None:
        """Return the block with this content if it can be fetched."""
        block = self._kept.get(key)
        return block if block is not None and block.ready else None

    def keeps(self, key: ContentKey) -> bool:
        """Tell whether the content is here or on its way here."""
        return key in self._kept

    def touch(self, key: ContentKey) -> None:
        """Mark a content as just used."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def add(self, content: BlockContent) -> HostBlock | None:
        """Take a slot for a content that is not here; it cannot be found before `stored`.

        Returns:
            The block, held for the copy; None when every slot is held.
        """
        slot = self._take_slot()
        if slot is None:
            return None
        block = self._kept[content.key] = HostBlock(slot, content)
        return block

    def reserve(self, count: int) -> list[HostBlock] | None:
        """Take slots for a swapped request's blocks; None, and nothing taken, if there are too few."""
        if count > len(self._free) + sum(not block.holders for block in self._kept.values()):
            return None
        blocks = []
        for _ in range(count):
            slot = self._take_slot()
            assert slot is not None, "counted above"
            blocks.append(HostBlock(slot, None))
        self._swapped.update(blocks)
        return blocks

    def stored(self, blocks: Sequence[HostBlock]) -> None:
        """Copies into these blocks are done; parents before children they are announced.

        Args:
            blocks: As they were added; of a chain, children first.
        """
        contents = []
        for block in reversed(blocks):
            block.ready = True
            block.holders -= block.content is not None  # a swapped one stays held by its request
            if block.content is not None and self._kept.get(block.content.key) is block:
                contents.append(block.content)
        for run in runs(contents):
            self._announce(self._announcer.stored(run, MEDIUM_CPU))

    def hold(self, block: HostBlock) -> None:
        """Keep a block while it is read."""
        block.holders += 1

    def release(self, block: HostBlock) -> None:
        """End one `hold`, or a swapped request's claim."""
        assert block.holders > 0, "released more often than held"
        block.holders -= 1
        if block.content is None and not block.holders:
            self._swapped.remove(block)
            self._free.append(block.slot)

    def clear(self) -> None:
        """Forget all contents; no copy may be under way. Announced by whoever clears the pool."""
        assert not any(block.holders for block in self._kept.values()), "a copy is under way"
        self._free.extend(block.slot for block in self._kept.values())
        self._kept.clear()

    def cached_copies(self) -> dict[ContentKey, int]:
        """Return what can be fetched: what a listener's mirror must hold."""
        return {key: 1 for key, block in self._kept.items() if block.ready}

    def check_invariants(self, swapped: Sequence[HostBlock], restoring: Sequence[HostBlock]) -> None:
        """Assert that every slot is free once or used once, and that contents are where they say.

        Args:
            swapped: Slots of requests that are swapped out.
            restoring: Slots that are read for running requests.
        """
        used = [block.slot for block in (*self._kept.values(), *self._swapped)]
        assert sorted([*self._free, *used]) == list(range(self.num_blocks)), "a slot leaked or is used twice"
        for key, block in self._kept.items():
            assert block.content is not None
            assert block.content.key == key, "a host block cannot be found"
            assert block.ready or block.holders, "a host block waits for a copy that nobody makes"
        assert all(block.content is None and block.holders for block in self._swapped)
        assert self._swapped.issuperset(swapped), "a swapped request lost its slots"
        assert all(source.holders for source in restoring), "a slot that is read may be reused"

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, block in self._kept.items():
            if not block.holders:
                del self._kept[key]
                assert block.content is not None
                self._announce(self._announcer.removed(block.content, MEDIUM_CPU))
                return block.slot
        return None
