"""What listeners who heard every event hold by now: kept up by the events themselves, told again as events.

In: the events of each step, in order. Out: events that give an empty view the same content. Because it is fed
by what is published, it knows of tiers, groups and adapters exactly what listeners know. Knows no sequence
numbers and no sockets.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from model_server.events import BlockHash, BlockRemoved, BlockStored, ExtraKeys, KVEvent

_RUN_BLOCKS = 512

# One block's content: its hash within its KV cache group.
_Name = tuple[int | None, BlockHash]


class _Content(msgspec.Struct, frozen=True, gc=False):
    """What one block was announced with.

    Attributes:
        event: The announcement, its lists left out.
        parent: The block before it.
        tokens: Its tokens, or those of its whole run where the run named only some of its blocks.
        extra_keys: Its entry of the announcement's.
        whole: Whether the tokens are exactly its own.
    """

    event: BlockStored
    parent: BlockHash | None
    tokens: "array[int]"
    extra_keys: ExtraKeys | None
    whole: bool


class _Held(msgspec.Struct, frozen=True, gc=False):
    """A block that is held; replaced, never changed, so that a copy of the books is a copy of one dict.

    Attributes:
        content: What it is.
        copies: Physical copies by medium; none of them 0.
    """

    content: _Content
    copies: Mapping[str | None, int]


class CacheMirror:
    """The announced content of one engine's caches, in all tiers and groups."""

    def __init__(self) -> None:
        self._held: dict[_Name, _Held] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Take what one step announced."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._held.clear()

    def copy(self) -> "CacheMirror":
        """What is held now; later events do not change it."""
        mirror = CacheMirror()
        mirror._held = self._held.copy()
        return mirror

    def copies(self) -> int:
        """How many copies are held."""
        return sum(sum(held.copies.values()) for held in self._held.values())

    def events(self) -> Iterator[BlockStored]:
        """Announce all that is held.

        First one copy of each block, parents before children, in runs. Then the other copies, each for itself
        and children before parents: a run that is continued in the same batch may be taken for one that is
        only told again.
        """
        order = self._parents_first()
        yield from self._runs(order)
        for name in reversed(order):
            held = self._held[name]
            for position, (medium, copies) in enumerate(held.copies.items()):
                for _ in range(copies - (position == 0)):
                    yield _announce([name[1]], [held.content], medium)

    def _store(self, event: BlockStored) -> None:
        count, size = len(event.block_hashes), event.block_size
        whole = len(event.token_ids) == count * size
        header = BlockStored(
            block_hashes=(),
            parent_block_hash=None,
            token_ids=(),
            block_size=size,
            lora_id=event.lora_id,
            medium=None,
            lora_name=event.lora_name,
            group_idx=event.group_idx,
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
        )
        tokens = array("I", event.token_ids)
        parent = event.parent_block_hash
        for position, block_hash in enumerate(event.block_hashes):
            name = (event.group_idx, block_hash)
            held = self._held.get(name)
            if held is None:
                if not tokens:
                    # A tier that names only hashes, and this one was never announced with its tokens.
                    continue
                own = tokens[position * size : (position + 1) * size] if whole else tokens
                extra = event.extra_keys[position] if event.extra_keys is not None else None
                start = parent if whole else event.parent_block_hash
                self._held[name] = _Held(_Content(header, start, own, extra, whole), {event.medium: 1})
            else:
                copies = {**held.copies, event.medium: held.copies.get(event.medium, 0) + 1}
                self._held[name] = _Held(held.content, copies)
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            name = (event.group_idx, block_hash)
            held = self._held.get(name)
            if held is None or event.medium not in held.copies:
                continue
            left = {**held.copies, event.medium: held.copies[event.medium] - 1}
            if not left[event.medium]:
                del left[event.medium]
            if left:
                self._held[name] = _Held(held.content, left)
            else:
                del self._held[name]

    def _parents_first(self) -> list[_Name]:
        order: list[_Name] = []
        placed: set[_Name] = set()
        for name in self._held:
            chain = []
            at: _Name | None = name
            while at is not None and at in self._held and at not in placed:
                placed.add(at)
                chain.append(at)
                parent = self._held[at].content.parent
                at = None if parent is None else (at[0], parent)
            order.extend(reversed(chain))
        return order

    def _runs(self, order: Sequence[_Name]) -> Iterator[BlockStored]:
        hashes: list[BlockHash] = []
        contents: list[_Content] = []
        medium: str | None = None
        for group, block_hash in order:
            held = self._held[group, block_hash]
            content, first = held.content, next(iter(held.copies))
            joins = (
                0 < len(hashes) < _RUN_BLOCKS
                and content.whole
                and contents[-1].whole
                and content.parent == hashes[-1]
                and first == medium
                and content.event == contents[-1].event
            )
            if hashes and not joins:
                yield _announce(hashes, contents, medium)
                hashes, contents = [], []
            hashes.append(block_hash)
            contents.append(content)
            medium = first
        if hashes:
            yield _announce(hashes, contents, medium)


def _announce(hashes: list[BlockHash], contents: list[_Content], medium: str | None) -> BlockStored:
    tokens: list[int] = []
    for content in contents:
        tokens.extend(content.tokens)
    event = contents[0].event
    extra_keys = [content.extra_keys for content in contents]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=contents[0].parent,
        token_ids=tokens,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=medium,
        lora_name=event.lora_name,
        extra_keys=extra_keys if any(extra is not None for extra in extra_keys) else None,
        group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
    )
