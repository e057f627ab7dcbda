"""KV blocks as numbers with bookkeeping, and the queue of free ones in the order of their reuse.

In: blocks that nobody holds. Out: the next to be reused. Knows neither hashes' meaning nor requests.
"""

from collections.abc import Iterable, Iterator

from model_server.block_content import BlockContent


class Block:
    """One physical KV block."""

    __slots__ = ("block_id", "content", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id  # row of the KV tensors
        self.ref_count = 0  # requests that hold it; 0 means that it is in the free queue
        self.content: BlockContent | None = None  # what it holds once it is full and can be found, else None
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.content is not None})"


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
