"""Chats of a wanted size that share a system prompt and differ in all else; sizes in, request bodies out."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from benchmarks.fake_pod import CHUNKS, CHUNKS_FEW, MODEL

# Name -> (bytes of one body, different chats).
SIZES = {"small": (2_000, 64), "40kb": (40_000, 32), "400kb": (400_000, 4)}
_SYSTEM = "You are a careful assistant. Answer in one sentence, and say so when you do not know. " * 5
_TURN_WORDS = 60


def write_bodies(directory: Path) -> dict[str, Path]:
    """One file per size, one chat a line; and small chats that ask for streams of many and of few events."""
    paths = {}
    for name, (size, number) in SIZES.items():
        paths[name] = directory / f"{name}.jsonl"
        chats = [_chat(size, seed) for seed in range(number)]
        paths[name].write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        if name == "small":
            for stream, chunks in (("stream", CHUNKS), ("sparse", CHUNKS_FEW)):
                paths[stream] = directory / f"{stream}.jsonl"
                asked = ({**chat, "stream": True, "max_tokens": chunks} for chat in chats)
                paths[stream].write_text("".join(json.dumps(chat) + "\n" for chat in asked))
    paths["all"] = directory / "all.jsonl"
    paths["all"].write_text("".join(paths[name].read_text() for name in SIZES))
    return paths


def _chat(size_bytes: int, seed: int) -> dict[str, object]:
    """A conversation of many turns, the last one the user's."""
    random = Random(seed)
    messages = [{"role": "system", "content": _SYSTEM}]
    written = len(_SYSTEM)
    while written < size_bytes:
        for role in ("user", "assistant"):
            words = min(_TURN_WORDS, max(4, (size_bytes - written) // 12))
            text = " ".join(f"w{random.randrange(100_000)}" for _ in range(words))
            messages.append({"role": role, "content": text})
            written += len(text) + 40
    messages.append({"role": "user", "content": "And why?"})
    return {"model": MODEL, "messages": messages}
