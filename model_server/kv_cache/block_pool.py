"""The pool of KV blocks, as numbers: who holds which, which are free, which can be found by their content."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_server.kv_events.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    Announcer,
    BlockContent,
    BlockStored,
    ContentKey,
    KVEvent,
)


@dataclass(slots=True, eq=False)
class Block:
    """One physical KV block."""

    block_id: int  # row of the KV tensors
    ref_count: int = 0  # requests that hold it; 0 means that it is free
    content: BlockContent | None = None  # what it holds once it is full and can be found, else None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.content is not None})"


@dataclass(eq=False)
class BlockPool:
    """All blocks of one device; the KV cache groups of a model share them.

    Several blocks may hold one content: two requests that compute the same at the same time keep one copy
    each, and each copy is announced and removed for itself, so listeners must count.
    """

    num_blocks: int
    announcer: Announcer
    # Told of a block that is about to lose its content, while it still has it.
    on_evict: Callable[[Block], object] | None = None

    def __post_init__(self) -> None:
        self.blocks = [Block(block_id) for block_id in range(self.num_blocks)]  # by their number
        # Those that nobody holds, by number, in the order of their reuse; many can still be found, and a
        # cache hit takes one out of the middle.
        self.free = OrderedDict((block.block_id, block) for block in self.blocks)
        self._cached: dict[ContentKey, dict[int, Block]] = {}
        self._events: list[KVEvent] = []
        # Since the last take_events: blocks whose content may not be computed yet, by what announced them.
        self._registered: list[tuple[BlockStored, Sequence[Block]]] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; many of them can still be found."""
        return len(self.free)

    def find(self, key: ContentKey) -> Block | None:
        copies = self._cached.get(key)
        return next(iter(copies.values())) if copies else None

    def touch(self, block: Block) -> None:
        """Hold a block that was found, free or held by others already."""
        if block.ref_count == 0:
            del self.free[block.block_id]
        block.ref_count += 1

    def allocate(self, count: int) -> list[Block]:
        """Take the blocks that have been free for longest; what they held can no longer be found."""
        assert count <= len(self.free), f"{count} blocks wanted, {len(self.free)} free"
        taken = [self.free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._evict(block)
            block.ref_count = 1
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back the blocks of one request, in chain order.

        The tail becomes free first, so that it is evicted first: a chain without its tail is still of use,
        one without its head is not. Blocks that cannot be found help nobody and go to the head.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free[block.block_id] = block
                if block.content is None:
                    self.free.move_to_end(block.block_id, last=False)

    def register(
        self,
        blocks: Sequence[Block],
        contents: Sequence[BlockContent],
        *,
        parent: bytes | None = None,
        token_ids: Sequence[int] | None = None,
        computed: bool = False,
    ) -> None:
        """Make full blocks of one request and group findable and announce them.

        Args:
            parent: As `Announcer.stored` takes it, and `token_ids`.
            computed: The content is there; else it comes with this step, and not if the step fails.
        """
        for block, content in zip(blocks, contents, strict=True):
            assert block.content is None, f"{block} is registered already"
            block.content = content
            self._cached.setdefault(content.key, {})[block.block_id] = block
        event = self.announcer.stored(contents, MEDIUM_GPU, parent=parent, token_ids=token_ids)
        self._events.append(event)
        if not computed:
            self._registered.append((event, blocks))

    def announce(self, event: KVEvent) -> None:
        """Add an event of another tier, in order."""
        self._events.append(event)

    def take_events(self) -> list[KVEvent]:
        """Return what happened since the last call; what was registered by now counts as computed."""
        events, self._events = self._events, []
        self._registered.clear()
        return events

    def forget_registered(self) -> list[Block]:
        """Unregister what was to be computed since the last `take_events`, and return it: it never was.

        Evictions of the same time did happen and stay in the events.
        """
        never_computed = [block for _, blocks in self._registered for block in blocks]
        for block in never_computed:
            self._unmap(block)
        never = {id(event) for event, _ in self._registered}
        self._events = [event for event in self._events if id(event) not in never]
        self._registered.clear()
        return never_computed

    def reset(self) -> bool:
        """Forget all content. Returns False, and does nothing, while any block is held."""
        if len(self.free) < len(self.blocks):
            return False
        for block in self.blocks:
            block.content = None
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def _evict(self, block: Block) -> None:
        content = block.content
        if content is None:
            return
        if self.on_evict is not None:
            self.on_evict(block)
        self._unmap(block)
        self._events.append(self.announcer.removed(content, MEDIUM_GPU))

    def _unmap(self, block: Block) -> None:
        assert block.content is not None
        key = block.content.key
        copies = self._cached[key]
        del copies[block.block_id]
        if not copies:
            del self._cached[key]
        block.content = None
