"""Chats of given sizes that share only their system prompt, and a tokenizer for them.

Messages are English prose. The tokenizer has Qwen3's chat template and 130,000 tokens, like current models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks.fake_pod import CHUNKS, CHUNKS_FEW, MODEL, model_directory
from benchmarks.next_turns import prose
from tokenization import TINY_DIRECTORY

# By name of a size: (bytes of one body, number of different chats).
SIZES = {"small": (2_000, 64), "40kb": (40_000, 32), "400kb": (400_000, 4)}
_SYSTEM = "You are a careful assistant. Answer in one sentence, and say so when you do not know. " * 5
_TURN_WORDS = 60
_TEMPLATE = Path(__file__).with_name("qwen3_template.jinja")


def write_bodies(directory: Path, *, tiny: bool = False) -> dict[str, Path]:
    """Write one file per size with one chat per line, and small chats that request long and short streams.

    The tokenizer is written next to them, to the folder of `model_directory`.

    Args:
        tiny: Use the built-in small tokenizer, which loads at once, instead of a large one.
    """
    words = prose().decode().split()
    paths = {}
    for name, (size, number) in SIZES.items():
        paths[name] = directory / f"{name}.jsonl"
        chats = [_chat(words, size, seed) for seed in range(number)]
        paths[name].write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        if name == "small":
            for stream, chunks in (("stream", CHUNKS), ("sparse", CHUNKS_FEW)):
                paths[stream] = directory / f"{stream}.jsonl"
                asked = ({**chat, "stream": True, "max_tokens": chunks} for chat in chats)
                paths[stream].write_text("".join(json.dumps(chat) + "\n" for chat in asked))
    paths["all"] = directory / "all.jsonl"
    paths["all"].write_text("".join(paths[name].read_text() for name in SIZES))
    _write_model(model_directory(paths["all"]), tiny=tiny)
    return paths


def _write_model(directory: Path, *, tiny: bool) -> None:
    if tiny:
        shutil.copytree(TINY_DIRECTORY, directory)
        return
    # Imports transformers, which takes seconds.
    from benchmarks.large_vocabulary import qwen_tokenizer

    directory.mkdir()
    qwen_tokenizer().save(str(directory / "tokenizer.json"))
    shutil.copyfile(_TEMPLATE, directory / "chat_template.jinja")


def _chat(prose_words: Sequence[str], size_bytes: int, seed: int) -> dict[str, object]:
    """Return a conversation of many turns that ends with a user message."""
    random = Random(seed)
    messages = [{"role": "system", "content": _SYSTEM}]
    written = len(_SYSTEM)
    while written < size_bytes:
        for role in ("user", "assistant"):
            words = min(_TURN_WORDS, max(4, (size_bytes - written) // 12))
            first = random.randrange(len(prose_words) - words)
            text = " ".join(prose_words[first : first + words])
            messages.append({"role": role, "content": text})
            written += len(text) + 40
    messages.append({"role": "user", "content": "And why?"})
    return {"model": MODEL, "messages": messages}
