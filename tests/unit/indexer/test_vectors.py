"""llm-d's recorded cases: scores equal llm-d's, except for listed flaws of llm-d."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from indexer.errors import PayloadError
from indexer.keys import Keys, MultimodalItem, extras_of_prompt, pack
from indexer.wire.tiers import Tiers
from tests.support.indexer.decoding import decode_batch
from tests.support.indexer.reference_index import ReferenceIndex
from tests.support.indexer.views import OnePod, read_json, read_lines

VECTORS = {vector["id"]: vector for vector in read_json("llmd_event_vectors.json.gz")}


class Differs(NamedTuple):
    """Expected result of a case: weighted blocks of the query, blocks held, and the reason."""

    score: float
    blocks: int
    why: str


# Flaws of llm-d that its own cases record; all others must give llm-d's score and number of blocks.
DIFFERENT = {
    "vllm-lora-name-plus-extra-key-string": Differs(1, 1, "an adapter's name is not an image"),
    "engine-bs16-canonical-64-single-block-events-lost": Differs(1, 1, "parts may arrive one by one"),
    "engine-bs16-canonical-24-not-divisible": Differs(
        0, 0, "24 is not a multiple of 16: counted and skipped"
    ),
    "one-bad-event-drops-whole-batch": Differs(1, 1, "only the unknown event is skipped"),
    "batch-two-fields-no-dp-rank": Differs(1, 1, "the rank is optional"),
    "tier-arbitrary-string-lowercased": Differs(0.8, 1, "an unknown tier has the slowest one's weight"),
    "sglang-stored-medium": Differs(0.8, 1, "CPU_PINNED is host memory"),
    "sglang-stored-lora-id-only": Differs(0, 0, "an adapter without a name is not the base model"),
    "token-negative-wraps": Differs(0, 0, "-1 is not a token"),
    "two-models-same-engine-hash-parent-resolves-to-wrong-model": Differs(
        0, 1, "hashes of two pods are independent, so the first block is removed"
    ),
    "two-pods-engine-hash-collision-different-tokens": Differs(
        0, 0, "hashes of two pods are independent, so the pod's own block is removed"
    ),
    "hash-encoded-as-uint8": Differs(0, 1, "any integer is a hash"),
    "hash-encoded-as-negfixint": Differs(0, 1, "any integer is a hash"),
    "clear-pod-all-tiers": Differs(
        0, 0, "the same score; llm-d's record counts blocks added before the clear"
    ),
}


def query(pod: OnePod, vector: dict[str, Any]) -> Keys:
    """Return the keys of the queried prompt with its extras."""
    tokens, size = vector.get("query_tokens") or [], vector["block_size"]
    match vector["id"]:
        case "vllm-lora-name" | "vllm-lora-name-plus-extra-key-string":
            return pod.keys(tokens, lora=vector["query_model"])
        case "vllm-extra-keys-mm":
            # An image without an offset, in the second block.
            return pod.keys(tokens, extras=[b"", pack(["imgA"], 0, size)])
        case "vllm-extra-keys-legacy-tuple":
            return pod.keys(
                tokens, extras=extras_of_prompt([MultimodalItem("imgA", 21, 3)], size, len(tokens))
            )
        case "engine-bs64-canonical-16-one-to-many":
            # In a prompt's first block such an image is indistinguishable from a salt.
            return pod.keys(tokens, salt="imgA")
        case "engine-bs16-canonical-64-many-to-one":
            return pod.keys(tokens, salt="a", extras=[pack(["b"], 32, size) + pack(["b"], 48, size)])
        case _:
            return pod.keys(tokens)


def first_pod(vector: dict[str, Any]) -> OnePod:
    """Return the queried pod after its messages; messages of other pods are applied to their own views."""
    pods: dict[str, OnePod] = {}
    for message in vector["messages"]:
        pod = pods.setdefault(message["topic"], OnePod(block_tokens=vector["block_size"]))
        try:
            decoded = decode_batch(bytes.fromhex(message["payload_hex"]), 1 << 20)
        except PayloadError:
            continue
        pod.apply(*decoded.batch.events)
    return next(iter(pods.values()))


def recorded(vector: dict[str, Any]) -> tuple[float, int]:
    """Return llm-d's score and the number of blocks that it added."""
    added = {
        key
        for operation in vector["index_ops"]
        if operation["op"] == "add"
        for key in operation.get("request_keys", ())
    }
    return next(iter((vector.get("scores") or {"none": 0}).values())), len(added)


@pytest.mark.parametrize("name", VECTORS)
def test_llmds_event_vectors_score_as_they_should(name: str) -> None:
    """Each recorded case gives llm-d's score and blocks, except where llm-d is known to be wrong."""
    vector = VECTORS[name]
    pod = first_pod(vector)
    score, blocks = recorded(vector)
    if name in DIFFERENT:
        assert DIFFERENT[name][:2] != (score, blocks), f"{name}: differs no more"
        score, blocks = DIFFERENT[name][:2]
    keys = query(pod, vector)
    if vector.get("scores") or vector.get("query_tokens"):
        assert pod.match(keys).weighted_blocks == pytest.approx(score)
    assert pod.index.stats().blocks == blocks


# The configuration rejects negative weights.
SCORES = [vector for vector in read_json("llmd_score_vectors.json.gz") if vector["id"] != "weight-negative"]
# llm-d compares media case-sensitively, and gives unknown ones the weight 1, above host memory.
SCORES_DIFFER = {
    "unknown-tier-weighs-1": {"A": 0.8, "B": 0.8},
    "tier-case-sensitive": {"A": 0.8},
    "empty-tier": {"A": 1},
}


@pytest.mark.parametrize("vector", SCORES, ids=lambda vector: vector["id"])
def test_llmds_score_vectors_are_weighted_prefixes(vector: dict[str, Any]) -> None:
    """Scores equal llm-d's: longest unbroken prefix, best tier of each block, sums never rounded."""
    tiers = Tiers(vector["weights"])
    index = ReferenceIndex(1000, tiers)
    for key, entries in vector["key_to_pods"].items():
        for entry in entries:
            tier = "speculative" if entry["Speculative"] else tiers.of_medium(entry["DeviceTier"])
            index.add(entry["PodIdentifier"], tier, np.array([key], np.uint64))
    found = index.match(np.array(vector["keys"], np.uint64), ["A", "B", "C"])
    scores = {pod: match.weighted_blocks for pod, match in found.items() if match.cached_blocks}
    assert scores == pytest.approx(SCORES_DIFFER.get(vector["id"], vector["scores"]))


def test_a_capture_of_llmds_simulator_is_applied_completely() -> None:
    """A capture of llm-d's simulator (9-element arrays, parent 0, sequence from 1) leaves no orphan."""
    pod = OnePod(block_tokens=16)
    held: set[int] = set()
    for frame in read_lines("llmd_sim_capture_array.jsonl.gz"):
        decoded = decode_batch(bytes.fromhex(frame["frames"][2]), 1 << 20)
        assert not decoded.rejected
        assert not pod.apply(*decoded.batch.events).skipped
        for tag, hashes, *_ in frame["payload"][1]:
            held = held | set(hashes) if tag == "BlockStored" else held - set(hashes)
        assert pod.index.stats().blocks == len(held)
    assert (len(held), pod.view.orphans) == (32, 0)
