"""The second tier of the KV cache, in host memory: which slot holds what, and which is reused next.

In: contents that are to be kept, found, held and let go. Out: slots, and the events that follow. Knows no
tensors and no streams: who copies says when a copy is done. Nothing can be found before its copy is there.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from model_server.block_content import Announcer, BlockContent, ContentKey, runs
from model_server.events import MEDIUM_CPU, KVEvent


class HostBlock:
    """One slot of host memory."""

    __slots__ = ("content", "holders", "ready", "slot")

    def __init__(self, slot: int, content: BlockContent) -> None:
        self.slot = slot  # row of the host tensors
        self.content = content  # what can be found in it
        # Copies under way into or out of it, and requests that are swapped out; it stays while there are any.
        self.holders = 1
        self.ready = False  # whether the copy into it is done


class HostTier:
    """A fixed number of slots, least recently used first out.

    Args:
        num_blocks: Slots; 0 for no such tier.
        announcer: Writes its events.
        announce: Takes them, in order.
    """

    def __init__(self, num_blocks: int, announcer: Announcer, announce: Callable[[KVEvent], None]) -> None:
        self.num_blocks = num_blocks  # slots
        self._announcer = announcer
        self._announce = announce
        self._free = list(range(num_blocks - 1, -1, -1))
        # What is here or on its way here, least recently used first.
        self.kept: OrderedDict[ContentKey, HostBlock] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return self.num_blocks - len(self._free)

    @property
    def is_held(self) -> bool:
        """Whether a block is being copied or held for a request."""
        return any(block.holders for block in self.kept.values())

    def find(self, key: ContentKey) -> HostBlock | None:
        """Return the block with this content if it can be fetched."""
        block = self.kept.get(key)
        return block if block is not None and block.ready else None

    def touch(self, key: ContentKey) -> HostBlock | None:
        """Mark a content as just used; returns its block, which may be on its way here yet."""
        if key in self.kept:
            self.kept.move_to_end(key)
        return self.kept.get(key)

    def add(self, content: BlockContent) -> HostBlock | None:
        """Take a slot for a content that is not here; it cannot be found before `stored`.

        Returns:
            The block, held for the copy; None when every slot is held.
        """
        slot = self._take_slot()
        if slot is None:
            return None
        block = self.kept[content.key] = HostBlock(slot, content)
        return block

    def stored(self, blocks: Sequence[HostBlock]) -> None:
        """Copies into these blocks are done; parents before children they are announced.

        Args:
            blocks: As they were added; of a chain, children first.
        """
        contents = []
        for block in reversed(blocks):
            block.ready = True
            block.holders -= 1
            if self.kept.get(block.content.key) is block:
                contents.append(block.content)
        for run in runs(contents):
            self._announce(self._announcer.stored(run, MEDIUM_CPU))

    def hold(self, block: HostBlock) -> None:
        """Keep a block while it is read."""
        block.holders += 1

    def release(self, block: HostBlock) -> None:
        """End one `hold`."""
        assert block.holders > 0, "released more often than held"
        block.holders -= 1

    def discard(self, block: HostBlock) -> None:
        """Free the slot of a block whose copy failed."""
        if self.kept.get(block.content.key) is block:
            del self.kept[block.content.key]
            self._free.append(block.slot)

    def clear(self) -> None:
        """Forget all contents; no copy may be under way. Announced by whoever clears the pool."""
        assert not self.is_held, "a block is held"
        self._free.extend(block.slot for block in self.kept.values())
        self.kept.clear()

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for key, block in self.kept.items():
            if not block.holders:
                del self.kept[key]
                self._announce(self._announcer.removed(block.content, MEDIUM_CPU))
                return block.slot
        return None
