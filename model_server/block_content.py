"""What a full KV block holds, and the event that announces a run of such blocks.

In: digests, tokens and whatever else a block's content depends on. Out: records that outlive the request, so
that a copy in another tier can be announced with its tokens. Knows no block numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from model_server.block_hash import ExtraKeys, event_hash
from model_server.events import BlockRemoved, BlockStored
from model_server.shapes import KvGroupSpec

# Blocks of different KV cache groups hold different layers' KV of the same tokens.
ContentKey: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """One full block."""

    group: int  # KV cache group
    digest: bytes  # chained hash of its tokens and all before them
    parent: bytes | None  # digest of the block before it; None at the start of a prompt
    token_ids: tuple[int, ...]  # its own tokens
    extra_keys: ExtraKeys | None  # what else entered the digest, tagged
    lora: tuple[int, str] | None  # number and name of the adapter that it was computed with

    @property
    def key(self) -> ContentKey:
        """What it is found by."""
        return self.group, self.digest


class Announcer:
    """Writes the events of one engine's blocks.

    Args:
        groups: KV cache groups of the model.
        block_tokens: Tokens in one block.
    """

    def __init__(self, groups: Sequence[KvGroupSpec], block_tokens: int) -> None:
        self.groups = tuple(groups)
        self.block_tokens = block_tokens

    def stored(
        self,
        contents: Sequence[BlockContent],
        medium: str,
        *,
        parent: bytes | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> BlockStored:
        """Announce blocks of one group.

        Args:
            contents: In chain order; without `token_ids` they follow one another.
            medium: Where they lie.
            parent: Digest of the block before the run that `token_ids` are of.
            token_ids: Of a longer run of which `contents` are a part; None if they are all of it.
        """
        first = contents[0]
        if token_ids is None:
            parent = first.parent
            token_ids = [token for content in contents for token in content.token_ids]
        group = self.groups[first.group]
        lora_id, lora_name = first.lora or (None, None)
        return BlockStored(
            block_hashes=[event_hash(content.digest) for content in contents],
            parent_block_hash=None if parent is None else event_hash(parent),
            token_ids=token_ids,
            block_size=self.block_tokens,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            # Readers get the bare values; the tags only keep the hash unambiguous.
            extra_keys=[
                None if content.extra_keys is None else [key[1] for key in content.extra_keys]
                for content in contents
            ],
            group_idx=first.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
        )

    def removed(self, content: BlockContent, medium: str) -> BlockRemoved:
        """Announce that one copy of a block is gone."""
        return BlockRemoved([event_hash(content.digest)], medium, content.group)


def runs(contents: Sequence[BlockContent]) -> Iterator[list[BlockContent]]:
    """Cut blocks into runs that one event can announce: each block the child of the one before it."""
    run: list[BlockContent] = []
    for content in contents:
        if run and (
            content.parent != run[-1].digest or content.group != run[-1].group or content.lora != run[-1].lora
        ):
            yield run
            run = []
        run.append(content)
    if run:
        yield run
