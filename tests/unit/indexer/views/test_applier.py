"""Event applier: the kernel has the same effect on an index as the pods' views event by event."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexer.config import IndexerConfig, PodStream
from indexer.index.engine_hashes import scoped_hash
from indexer.index.hash_table import GOLDEN, hash_bits
from indexer.index.index import TURN_BLOCKS, FlatIndex
from indexer.keys import BlockHasher, Keys
from indexer.views.applier import ApplierContext, EventApplier
from indexer.views.block_cache import BlockCache
from indexer.views.hybrid import group_holder
from indexer.views.pod_view import PodView
from indexer.views.view_parts import Outcome
from indexer.wire.tiers import Tiers
from tests.support.depth import examples
from tests.support.indexer.plain_view import DecodingApplier, MappedCache
from tests.support.indexer.reference_index import ReferenceIndex
from tests.support.indexer.views import read_lines

MODEL = "m"
TIERS = Tiers()
PODS = ("10.0.0.1:8000", "10.0.0.2:8000")
CONFIG = IndexerConfig(block_tokens=4, hash_seed=1)


class BothWays:
    """Two indexes with the same events: the reference event by event, the flat one by its kernel."""

    def __init__(self, block_tokens: int = 4, model_of: dict[str, str] | None = None) -> None:
        self.hasher = BlockHasher(block_tokens, 1)
        self.flat = FlatIndex(1 << 22, TIERS)
        self.reference = ReferenceIndex(10_000, TIERS)
        engine = ApplierContext(CONFIG, self.flat, self.hasher)
        self.fast: dict[str, EventApplier] = {}
        self.slow: dict[str, DecodingApplier] = {}
        for pod in PODS:
            model = (model_of or {}).get(pod, MODEL)
            self.fast[pod] = EventApplier(engine, PodStream(pod, model, "tcp://127.0.0.1:1"))
            self.slow[pod] = DecodingApplier(self._view(model, pod), CONFIG.max_payload_bytes)

    def _view(self, model: str, pod: str) -> PodView:
        def cache_of(group: int | None) -> Any:
            return MappedCache(self.reference, pod if group is None else group_holder(pod, group))

        return PodView(model, cache_of=cache_of, tiers=TIERS, hasher=self.hasher, config=CONFIG)

    def apply(self, pod: str, payloads: list[bytes]) -> Outcome:
        """Apply payloads both ways and compare the outcomes."""
        fast, slow = self.fast[pod].apply(payloads), self.slow[pod].apply(payloads)
        assert +fast.events == +slow.events
        assert (fast.rejected, fast.published_s) == (slow.rejected, slow.published_s)
        assert (fast.emptied, fast.damage) == (slow.emptied, slow.damage)
        assert +fast.skipped == +slow.skipped
        assert +fast.removals == +slow.removals
        assert _joined(fast.stored).tolist() == _joined(slow.stored).tolist()
        return fast

    def check(self, keys: Keys) -> None:
        """Check that every holder holds the same blocks in both."""
        for pod in PODS:
            for holder in (pod, *(group_holder(pod, group) for group in range(3))):
                assert self.flat.held(keys, holder).tolist() == self.reference.held(keys, holder).tolist()
        flat, reference = self.flat.stats(), self.reference.stats()
        assert (flat.blocks, flat.holdings) == (reference.blocks, reference.holdings)


def _joined(runs: list[Keys]) -> Keys:
    return np.concatenate(runs) if runs else np.empty(0, np.uint64)


# Prompts of a few blocks with common prefixes; an engine's hash depends on the content.
texts = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)


def hash_of(text: tuple[int, ...], salt: int = 0) -> int:
    """Return the engine's hash of a chain's last block."""
    return hash((text, salt)) & 0x7FFF_FFFF_FFFF_FFFF | 1


def tokens_of(text: tuple[int, ...], block: int) -> list[int]:
    """Return the tokens of these blocks."""
    return [number for number in text for _ in range(block)]


@st.composite
def stores(draw: st.DrawFn, seed: int) -> dict[str, Any]:
    """Draw a store of part of a chain of any group, mostly with a parent that may be known."""
    text = draw(texts)
    start = draw(st.integers(0, len(text) - 1))
    adapter = draw(st.sampled_from([None, None, None, "sql"]))
    run = text[start:]
    seed += 1 if adapter else 0
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [hash_of(text[: end + 1], seed) for end in range(start, len(text))],
        "parent_block_hash": hash_of(text[:start], seed) if start else draw(st.sampled_from([None, None, 0])),
        "token_ids": tokens_of(run, 4),
        "block_size": 4,
        "lora_id": 1 if adapter else None,
        "medium": draw(st.sampled_from([None, "GPU", "GPU", "CPU", "DISK", "odd"])),
        "lora_name": adapter,
    }
    named = [[adapter]] if adapter else [None]
    if draw(st.booleans()):
        event["extra_keys"] = named * len(run)
    if draw(st.integers(0, 9)) == 0:
        salted = [hash_of(text[: end + 1], seed + 2) for end in range(start, len(text))]
        first = [adapter, "salt"] if adapter else ["salt"]
        event |= {"extra_keys": [first, *named * (len(run) - 1)], "block_hashes": salted}
    if draw(st.integers(0, 9)) == 0:
        event |= {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    return event


@st.composite
def removals(draw: st.DrawFn, seed: int) -> dict[str, Any]:
    """Draw removals of some blocks of a chain in any order, once or twice."""
    text = draw(texts)
    seed += draw(st.sampled_from([0, 0, 0, 1, 2]))
    ends = draw(st.lists(st.integers(1, len(text)), min_size=1, max_size=3))
    return {
        "type": "BlockRemoved",
        "block_hashes": [hash_of(text[:end], seed) for end in ends],
        "medium": draw(st.sampled_from([None, "GPU", "GPU", "CPU"])),
    }


oddities = st.sampled_from(
    [
        {"type": "AllBlocksCleared"},
        {"type": "SomethingNew"},
        {"type": "BlockStored", "block_hashes": ["text"]},
        {
            "type": "BlockStored",
            "block_hashes": [],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 4,
        },
    ]
)
GROUPS: list[dict[str, Any]] = [
    {},
    {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
    {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8},
]


@st.composite
def batches(draw: st.DrawFn, seed: int, grouped: bool) -> bytes:
    """Draw one payload, sometimes an unreadable one."""
    if draw(st.integers(0, 19)) == 0:
        return b"\xc1"
    event = st.one_of(stores(seed), stores(seed), stores(seed), removals(seed), oddities)
    events = draw(st.lists(event, max_size=6))
    if grouped:
        fields = [draw(st.sampled_from(GROUPS[1:])) for _ in events]
        events = [
            event | {key: value for key, value in group.items() if key == "group_idx" or "token_ids" in event}
            for event, group in zip(events, fields, strict=True)
        ]
    return msgspec.msgpack.encode([1.5, events, None])


def all_keys(hasher: BlockHasher, models: set[str]) -> Keys:
    """Return the keys of all chains that the strategies can draw."""
    keys = set()
    for model in models:
        for lora in (None, "sql"):
            for salt in (None, "salt"):
                level: list[int] = [hasher.root(model, lora, salt)]
                for _ in range(5):
                    level = [int(hasher.chain(key, [number] * 4)[0]) for key in level for number in (1, 2, 3)]
                    keys.update(level)
    return np.array(sorted(keys), np.uint64)


HASHER = BlockHasher(4, 1)
KEYS = {models: all_keys(HASHER, set(models)) for models in [("m",), ("m", "n")]}


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), grouped=st.booleans(), two_models=st.booleans(), two_seeds=st.booleans())
def test_the_kernel_does_what_the_views_do(
    data: st.DataObject, grouped: bool, two_models: bool, two_seeds: bool
) -> None:
    """For any payloads of two pods the kernel and the views have the same outcome and index."""
    both = BothWays(model_of={PODS[1]: "n"} if two_models else None)
    for _ in range(data.draw(st.integers(1, 5))):
        pod = data.draw(st.sampled_from(PODS))
        seed = 10 if two_seeds and pod == PODS[1] else 0
        both.apply(pod, data.draw(st.lists(batches(seed, grouped), min_size=1, max_size=3)))
        both.check(KEYS["m", "n"] if two_models else KEYS["m",])


@pytest.mark.parametrize("capture", ["vllm_run1_frames.jsonl.gz", "vllm_run3_frames.jsonl.gz"])
@pytest.mark.parametrize("block_tokens", [32, 16])
def test_captures_of_a_real_engine_lead_to_the_same_index(capture: str, block_tokens: int) -> None:
    """Captured events of a real vLLM lead to the same index, applied at once or frame by frame."""
    payloads = [bytes.fromhex(frame["frames"][2]) for frame in read_lines(capture)]
    both = BothWays(block_tokens)
    stored = []
    for start in range(0, len(payloads), 7):
        stored += both.apply(PODS[0], payloads[start : start + 7]).stored
    assert stored
    both.check(np.unique(_joined(stored)))


def test_more_copies_than_one_call_has_room_for_are_all_counted() -> None:
    """A store without tokens of more blocks than one kernel call has room for counts a copy of each."""
    blocks = 5000
    config = IndexerConfig(block_tokens=1, hash_seed=1)
    hasher, index = BlockHasher(1, 1), FlatIndex(1 << 22, TIERS)
    state = EventApplier(
        ApplierContext(config, index, hasher), PodStream(PODS[0], MODEL, "tcp://127.0.0.1:1")
    )
    hashes = list(range(1, blocks + 1))
    event: dict[str, Any] = {
        "type": "BlockStored",
        "parent_block_hash": None,
        "medium": "GPU",
        "lora_id": None,
    }
    store = event | {"block_hashes": hashes, "token_ids": hashes, "block_size": 1}
    copy = event | {"token_ids": [], "block_size": 0}
    parts = [copy | {"block_hashes": hashes[start : start + 700]} for start in range(0, blocks, 700)]
    removal = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
    for events in ([store], [copy | {"block_hashes": hashes}], parts):
        state.apply([msgspec.msgpack.encode([1.0, events, None])])
    for left in (blocks, blocks, 0):
        state.apply([msgspec.msgpack.encode([1.0, [removal], None])])
        assert index.stats().blocks == left


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("hashes_per_event", [1, 3, 150])
@pytest.mark.parametrize("split", [1, 4])
def test_long_rows_of_removals_do_what_the_views_do(split: int, hashes_per_event: int, seed: int) -> None:
    """Long removals by pods with different hashes have the same effect both ways, in any order."""
    rng = np.random.default_rng(seed)
    both = BothWays()
    blocks, block_tokens = 400, 4 * split
    tokens = rng.integers(0, 1000, blocks * block_tokens).tolist()
    stored: list[Keys] = []
    for pod, first in zip(PODS, (1, 10_001), strict=True):
        hashes = np.arange(first, first + blocks)
        store = _stored(hashes, tokens, block_tokens)
        copies = [
            _stored(rng.permutation(hashes)[:100], [], 0, medium=medium) for medium in ("GPU", "CPU", "CPU")
        ]
        stored += both.apply(pod, [_payload(store), _payload(*copies)]).stored
    keys = np.unique(_joined(stored))
    for pod, first in zip(PODS, (1, 10_001), strict=True):
        # One in ten hashes is unknown; many occur twice.
        hashes = rng.integers(first, first + blocks + blocks // 10, 3 * blocks)
        removals = [
            _removed(hashes[start : start + hashes_per_event], medium=str(rng.choice(["GPU", "GPU", "CPU"])))
            for start in range(0, len(hashes), hashes_per_event)
        ]
        # A store in between restores removed blocks.
        removals.insert(len(removals) // 2, _stored(np.arange(first, first + blocks), tokens, block_tokens))
        both.apply(pod, [_payload(*removals[:2]), _payload(*removals[2:])])
        both.check(keys)


@pytest.mark.parametrize("unknown", [0, 1, 2048, 2049, 4999])
@pytest.mark.parametrize("split", [1, 3])
def test_a_long_removal_is_completed_after_an_interruption(split: int, unknown: int) -> None:
    """A removal interrupted by a turn's end or an unknown hash is completed, each copy once."""
    both = BothWays()
    blocks, block_tokens = 5000 // split, 4 * split
    hashes = np.arange(1, blocks + 1)
    store = _stored(hashes, np.arange(blocks * block_tokens).tolist(), block_tokens)
    keys = _joined(both.apply(PODS[0], [_payload(store, _stored(hashes[::3], [], 0))]).stored)
    # Each block has one copy, every third two; the last hash occurs three times.
    named = np.insert(np.append(hashes, hashes[-1:].repeat(2)), unknown // split, 10_000)
    for _ in range(2):
        both.apply(PODS[0], [_payload(_removed(named), _removed(hashes[:1]))])
        both.check(keys)


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_a_copy_is_completed_after_an_interruption(unknown: int) -> None:
    """An unknown hash in an event of copies changes nothing for its neighbours."""
    both = BothWays()
    hashes = np.arange(1, 3)
    stored = both.apply(PODS[0], [_payload(_stored(hashes, list(range(8)), 4))]).stored
    both.apply(PODS[0], [_payload(_stored(np.insert(hashes, unknown, 10_000), [], 0))])
    for _ in range(2):
        both.apply(PODS[0], [_payload(_removed(hashes))])
        both.check(_joined(stored))


def test_hashes_that_share_a_bucket_are_distinct() -> None:
    """Removing an unknown hash keeps a block whose scoped hash has the same 32 bits."""
    both = BothWays()
    cache = BlockCache(both.flat, PODS[0], MODEL)
    known = int(scoped_hash(np.uint64(1), np.uint64(cache.scope), 0))
    # The next product with GOLDEN, and the handle from which `scoped_hash` computes it.
    name = (known * int(GOLDEN) + 1) * pow(int(GOLDEN), -1, 1 << 64) % (1 << 64)
    like = (name ^ name >> 32) * pow(0xBF58_476D_1CE4_E5B9, -1, 1 << 64) % (1 << 64) ^ cache.scope
    assert int(scoped_hash(np.uint64(like), np.uint64(cache.scope), 0)) == name != known
    assert hash_bits(np.uint64(name)) == hash_bits(np.uint64(known))
    stored = both.apply(PODS[0], [_payload(_stored(np.array([1]), [1, 2, 3, 4], 4))]).stored
    for hashes in ([like], [1]):
        both.apply(PODS[0], [_payload(_removed(np.array(hashes, np.uint64)))])
        both.check(_joined(stored))


@pytest.mark.parametrize("hashes_per_event", [1, 5000])
def test_a_long_row_of_removals_lets_readers_in_between(hashes_per_event: int) -> None:
    """Each turn under the lock removes a bounded number of blocks, however many one event has."""
    blocks = 5000
    held: list[int] = []

    class Counting(FlatIndex):
        def sweep_to_fit(self, blocks: int) -> None:
            held.append(int(self.arrays.pod_blocks.sum()))
            super().sweep_to_fit(blocks)

    hasher, index = BlockHasher(1, 1), Counting(1 << 22, TIERS)
    config = IndexerConfig(block_tokens=1, hash_seed=1)
    state = EventApplier(
        ApplierContext(config, index, hasher), PodStream(PODS[0], MODEL, "tcp://127.0.0.1:1")
    )
    hashes = np.arange(1, blocks + 1)
    state.apply([_payload(_stored(hashes, hashes.tolist(), 1))])
    held.clear()
    parts = [hashes[place : place + hashes_per_event] for place in range(0, blocks, hashes_per_event)]
    state.apply([_payload(*map(_removed, parts))])
    assert index.stats().blocks == 0
    assert max(before - after for before, after in pairwise([*held, 0])) <= 2 * TURN_BLOCKS


def _stored(
    hashes: NDArray[np.int64], tokens: list[int], block_tokens: int, medium: str = "GPU"
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes.tolist(),
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": block_tokens,
        "lora_id": None,
        "medium": medium,
    }


def _removed(hashes: NDArray[np.int64] | NDArray[np.uint64], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes.tolist(), "medium": medium}


def _payload(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, events, None])
