"""The pool of KV blocks: who holds which, which are free, and which can be found by their hash.

In: how many blocks are wanted, given back or became full. Out: blocks, and the cache events that follow
from it, in order. Knows neither tensors nor requests; a block here is a number with bookkeeping.
"""

from collections.abc import Iterable, Iterator, Sequence

from model_server.block_hash import ExtraKeys, event_hash
from model_server.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_GROUP_IDX = 0  # models of one attention kind have one group


class Block:
    """One physical KV block.

    Attributes:
        block_id: Row of the KV tensors.
        ref_count: Requests that hold it; 0 means that it is in the free queue.
        digest: Hash of its content once it is full and can be found, else None.
    """

    __slots__ = ("block_id", "digest", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.digest is not None})"


class FreeQueue:
    """Free blocks in the order of their reuse: a doubly linked list through the blocks themselves.

    Unlike a deque it lets go of a block in the middle at once, as a cache hit on a free block needs.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ends = Block(-1)  # one sentinel closes the ring: its next is the head, its previous the tail
        self._ends.previous = self._ends.next = self._ends
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put a block at the tail: reused last."""
        self._link(block, before=self._ends)

    def prepend(self, block: Block) -> None:
        """Put a block at the head: reused next."""
        assert self._ends.next is not None
        self._link(block, before=self._ends.next)

    def pop(self) -> Block:
        """Take the head."""
        block = self._ends.next
        assert block is not None
        assert block is not self._ends, "no free block"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it stands."""
        assert block.previous is not None, f"{block} is not in the free queue"
        assert block.next is not None
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = None
        self._length -= 1

    def _link(self, block: Block, before: Block) -> None:
        assert block.next is None, f"{block} is in the free queue already"
        assert before.previous is not None
        block.previous, block.next = before.previous, before
        before.previous.next = before.previous = block
        self._length += 1


class BlockPool:
    """All blocks of one device.

    Several blocks may carry one hash: two requests that compute the same content at the same time keep
    one copy each, and each copy is announced and removed for itself, so listeners must count.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeQueue(self._blocks)
        self._cached: dict[bytes, dict[int, Block]] = {}
        self._events: list[KVEvent] = []
        self._registered: list[Block] = []  # since the last take_events: content may not be computed yet

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; many of them can still be found by their hash."""
        return len(self._free)

    def find(self, digest: bytes) -> Block | None:
        """Return a block with this content, if there is one."""
        copies = self._cached.get(digest)
        return next(iter(copies.values())) if copies else None

    def touch(self, blocks: Iterable[Block]) -> None:
        """Hold blocks that were found, free or held by others already."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def allocate(self, count: int) -> list[Block]:
        """Take the blocks that have been free for longest; what they held can no longer be found."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._evict(block)
            block.ref_count = 1
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back the blocks of one request, in chain order.

        The tail becomes free first, so that it is evicted first: a chain without its tail is still of use,
        one without its head is not. Blocks that cannot be found by hash help nobody and go to the head.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is free already"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.digest is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def register(
        self,
        blocks: Sequence[Block],
        digests: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        extra_keys: Sequence[ExtraKeys | None],
    ) -> None:
        """Make a run of full blocks of one request findable and announce it.

        Args:
            blocks: The run, in chain order.
            digests: One per block.
            parent: Digest of the block before the run, None at the start of a prompt.
            token_ids: The tokens of the whole run.
            extra_keys: One entry per block, tagged.
        """
        for block, digest in zip(blocks, digests, strict=True):
            assert block.digest is None, f"{block} is registered already"
            block.digest = digest
            self._cached.setdefault(digest, {})[block.block_id] = block
        self._registered.extend(blocks)
        self._events.append(
            BlockStored(
                block_hashes=[event_hash(digest) for digest in digests],
                parent_block_hash=None if parent is None else event_hash(parent),
                token_ids=token_ids,
                block_size=self.block_tokens,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None,
                # Readers get the bare values; the tags only keep the hash unambiguous.
                extra_keys=[None if keys is None else [key[1] for key in keys] for keys in extra_keys],
                group_idx=_GROUP_IDX,
                kv_cache_spec_kind="full_attention",
            )
        )

    def take_events(self) -> list[KVEvent]:
        """Return what happened since the last call; what was registered by now counts as computed."""
        events, self._events = self._events, []
        self._registered.clear()
        return events

    def forget_registered(self) -> None:
        """Unregister what was registered since the last `take_events`: its content was never computed.

        Evictions of the same time did happen and stay in the events.
        """
        for block in self._registered:
            self._unmap(block)
        self._registered.clear()
        self._events = [event for event in self._events if not isinstance(event, BlockStored)]

    def reset(self) -> bool:
        """Forget all hashes. Returns False, and does nothing, while any block is held."""
        if len(self._free) < len(self._blocks):
            return False
        for block in self._blocks:
            block.digest = None
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def cached_copies(self) -> dict[int, int]:
        """Return how many blocks carry each event hash: what a listener's mirror must hold."""
        return {event_hash(digest): len(copies) for digest, copies in self._cached.items()}

    def check_invariants(self, tables: Iterable[Sequence[Block]]) -> None:
        """Assert that every block is either free once or held as often as its count says.

        Args:
            tables: The block tables of all requests that hold blocks.
        """
        held = [0] * len(self._blocks)
        for table in tables:
            for block in table:
                held[block.block_id] += 1
        free = list(self._free)
        assert len(free) == len(self._free), "the free queue's length is wrong"
        assert len({block.block_id for block in free}) == len(free), "a block is in the free queue twice"
        for block in self._blocks:
            assert block.ref_count == held[block.block_id], f"{block} is held {held[block.block_id]} times"
            is_free = block.next is not None
            assert is_free == (block.ref_count == 0), f"{block} leaked or is free while held"
            if block.digest is not None:
                assert self._cached[block.digest][block.block_id] is block, f"{block} cannot be found"
        assert sum(block.ref_count == 0 for block in self._blocks) == len(free)
        hashed = sum(block.digest is not None for block in self._blocks)
        assert hashed == sum(map(len, self._cached.values())), "a hash points to a block that lost it"
        assert all(self._cached.values()), "a hash without a block"

    def _evict(self, block: Block) -> None:
        if block.digest is not None:
            removed = event_hash(block.digest)
            self._unmap(block)
            self._events.append(BlockRemoved(block_hashes=[removed], medium=MEDIUM_GPU, group_idx=_GROUP_IDX))

    def _unmap(self, block: Block) -> None:
        assert block.digest is not None
        copies = self._cached[block.digest]
        del copies[block.block_id]
        if not copies:
            del self._cached[block.digest]
        block.digest = None
