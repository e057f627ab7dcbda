"""Block hashes, compared with vLLM's sha256_cbor."""

import json

import pytest

from model_server.kv_cache.request import Request
from model_server.kv_events.hashing import (
    ROOT_BLOCK_HASH,
    encode_cbor,
    event_hash,
    hash_block,
    root_block_hash,
)
from model_server.requests import EngineCoreRequest, SamplingParams
from tests.support.paths import DATA

VECTORS = json.loads((DATA / "block_hash_vectors.json").read_bytes())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['seed']}-{vector['case']}")
def test_hashes_equal_vllms(vector: dict) -> None:
    """Block hashes and event hashes equal those computed by vLLM for every kind of extra key."""
    parent = root_block_hash(vector["seed"])
    assert parent.hex() == vector["none_hash"]
    size = vector["block_size"]
    for index, (digest, number) in enumerate(zip(vector["block_hashes"], vector["int64"], strict=True)):
        parent = hash_block(
            parent, vector["token_ids"][index * size : (index + 1) * size], vector["extra_keys"][index]
        )
        assert parent.hex() == digest
        assert event_hash(parent) == number


def test_the_salt_enters_as_vllm_tags_it() -> None:
    """A salted prompt's first block has the extra keys of vLLM's vectors."""
    vector = next(vector for vector in VECTORS if vector["case"].startswith("salt"))
    salted, plain = (
        Request(EngineCoreRequest("a", (1,), SamplingParams(max_tokens=1), cache_salt=salt), 0)
        for salt in ("tenant-42", None)
    )
    assert [list(key) for key in salted.extra_keys(0) or ()] == vector["extra_keys"][0]
    assert salted.extra_keys(1) is None
    assert plain.extra_keys(0) is None


def test_the_default_seed_is_vllms() -> None:
    """Without a seed the root hash derives from vLLM's fixed string."""
    assert root_block_hash("vllm-none-hash") == ROOT_BLOCK_HASH


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (23, "17"),
        (24, "1818"),
        (256, "190100"),
        (65536, "1a00010000"),
        (1 << 32, "1b0000000100000000"),
        (-12, "2b"),
        (b"\x01\x02", "420102"),
        ("ü", "62c3bc"),
        (None, "f6"),
        ([1, [2, 3]], "8201820203"),
    ],
)
def test_cbor_is_canonical(value: object, encoded: str) -> None:
    """Every type is encoded in the fewest bytes (RFC 8949, appendix A, and neighbouring values)."""
    assert encode_cbor(value).hex() == encoded  # type: ignore[arg-type]
