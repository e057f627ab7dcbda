"""Prompts for real engines: shared prefixes, repeats, exact multiples of the block, salts, chats, long talks.

A script is a generator of (path, body) that receives each answer. The same seed gives the same scripts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from tests.support.engines.checkpoints import VOCABULARY
from tests.support.engines.door import Door, Served
from tests.support.engines.engine import MODEL

Script = Generator[tuple[str, dict[str, Any]], dict[str, Any], None]

_FIRST_TEXT_TOKEN = 300
_WORDS = (
    "ship",
    "river",
    "stone",
    "quiet",
    "amber",
    "north",
    "window",
    "garden",
    "copper",
    "winter",
    "signal",
)


def play(
    door: Door, block_tokens: int, *, rounds: int, at_once: int, await_events: Callable[[], object]
) -> list[Served]:
    """Run scripts, this many at once; each awaits its events before its next request."""

    def run(script: Script) -> list[Served]:
        served: list[Served] = []
        try:
            call = next(script)
            while True:
                served.append(door.ask(*call))
                await_events()
                call = script.send(served[-1].answer)
        except StopIteration:
            return served

    with ThreadPoolExecutor(at_once) as pool:
        scripts = _scripts(random.Random(at_once), rounds, block_tokens)
        return list(chain.from_iterable(pool.map(run, scripts)))


def _scripts(chance: random.Random, rounds: int, block_tokens: int) -> Iterator[Script]:
    """Yield the scripts of this many rounds, 23 requests each, which share documents and a system text."""
    documents = [_tokens(chance, length) for length in (3 * block_tokens, 170, 420)]
    system = _words(chance, 80)
    for number in range(rounds):
        whole = _tokens(chance, chance.randrange(2, 12) * block_tokens)
        ends = [_tokens(chance, length) for length in (0, 0, 1, block_tokens - 1, block_tokens)]
        yield _prompts([whole + end for end in ends] + [whole[:-1]])
        private = documents[number % 3] + _tokens(chance, 40)
        yield _prompts([private] * 3, salts=[f"tenant-{number % 2}"] * 2)
        yield _talk(chance, documents[(number + 1) % 3])
        yield _chat(chance, system)
        # Some leave the document within its first block.
        lengths = [chance.randrange(10, 420) for _ in range(5)]
        yield _prompts([documents[number % 3][:length] + _tokens(chance, 50) for length in lengths])


def _prompts(prompts: list[list[int]], salts: list[str] | None = None) -> Script:
    """Ask prompts one by one, the first ones with salts."""
    for number, prompt in enumerate(prompts):
        salt = {"cache_salt": salts[number]} if salts and number < len(salts) else {}
        yield "/v1/completions", _body(prompt=prompt, max_tokens=1, **salt)


def _talk(chance: random.Random, prompt: list[int]) -> Script:
    """Continue each answer's tokens with more of the user's."""
    for max_tokens in chance.sample((1, 5, 17, 40, 60), 5):
        prompt = prompt + _tokens(chance, chance.randrange(1, 60))
        answer = yield "/v1/completions", _body(prompt=prompt, max_tokens=max_tokens)
        prompt = prompt + answer["choices"][0]["token_ids"]


def _chat(chance: random.Random, system: str) -> Script:
    """Hold a chat of four turns under a system text."""
    messages = [{"role": "system", "content": system}]
    for max_tokens in (2, 9, 2, 9):
        messages.append({"role": "user", "content": _words(chance, chance.randrange(3, 40))})
        answer = yield "/v1/chat/completions", _body(messages=messages, max_tokens=max_tokens)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"})


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}


def _tokens(chance: random.Random, count: int) -> list[int]:
    return chance.choices(range(_FIRST_TEXT_TOKEN, VOCABULARY), k=count)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(_WORDS, k=count))
