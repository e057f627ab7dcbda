"""Captures of vLLM 0.32: rendered prompts with images, and the KV events of the same prompts."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tests.support.paths import DATA

_DATA = json.loads((DATA / "vllm_0_32_images.json").read_text("utf-8"))
BLOCK_TOKENS: int = _DATA["block_tokens"]
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in _DATA["cases"]}


def answer(name: str) -> bytes:
    """Return the render endpoint's answer for a case's chat."""
    return json.dumps(CASES[name]["rendered"]).encode()


def payloads(name: str) -> list[bytes]:
    """Return the event batches of a case's prefill."""
    return [bytes.fromhex(payload) for payload in CASES[name]["payloads"]]


def engine_hashes(name: str) -> list[int]:
    """Return vLLM's hashes of a case's full blocks; equal hashes are reused blocks."""
    events = [event for payload in payloads(name) for event in msgspec.msgpack.decode(payload)[1]]
    return [block for event in events for block in event["block_hashes"]]


def agreeing_blocks(one: str, other: str) -> int:
    """Return the number of blocks that vLLM would reuse between two prompts."""
    same = [mine == theirs for mine, theirs in zip(engine_hashes(one), engine_hashes(other), strict=False)]
    return [*same, False].index(False)
