"""Real vLLM servers beside a router: the cause of each prompt token, hit or computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.engines.beside import EAGLE, Beside, Case, running_beside
from tests.support.engines.checkpoints import VOCABULARY, eagle_head, hybrid, llama
from tests.support.engines.door import Served
from tests.support.engines.engine import MODEL

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BLOCK_TOKENS = 32
# Little more than a context of 4,096 tokens, so that a few prompts evict all others.
_FEW_BLOCKS = 136
_BLOCKS_OF_TWO_GROUPS = 272


@pytest.fixture(scope="module")
def pair(executables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    """Run two plain engines with little memory."""
    folder = tmp_path_factory.mktemp("pair")
    with running_beside(Case(llama, blocks=_FEW_BLOCKS), executables, folder, engines=2) as running:
        yield running


def ask(beside: Beside, prompt: Sequence[int], pod: int = 0, **fields: object) -> Served:
    """Complete a prompt by one token on one of the pods, and await its events."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    served = beside.door.ask("/v1/completions", body, pods=[beside.addresses[pod]])
    beside.await_events()
    assert served.predicted == served.delivered == served.causes.get("hit", 0)
    return served


def prompt_of(blocks: int, more: int = 4) -> list[int]:
    """Return random tokens: full blocks, and some more."""
    return random.choices(range(300, VOCABULARY), k=blocks * BLOCK_TOKENS + more)


def test_new_and_repeated_prompts(pair: Beside) -> None:
    """A new prompt was never cached; repeated, its full blocks are hits and its rest is a partial block."""
    prompt = prompt_of(3)
    assert ask(pair, prompt).causes == {"never_cached": 96, "partial_block": 4}
    assert ask(pair, prompt).causes == {"hit": 96, "partial_block": 4}


def test_the_last_token_is_in_a_partial_block(pair: Beside) -> None:
    """Of a repeated prompt of whole blocks the last block is computed for its last token."""
    prompt = prompt_of(3, 0)
    ask(pair, prompt)
    assert ask(pair, prompt).causes == {"hit": 64, "partial_block": 32}


def test_another_salt(pair: Beside) -> None:
    """A prompt that is cached under another salt is in another scope."""
    prompt = prompt_of(3)
    ask(pair, prompt, cache_salt="one")
    assert ask(pair, prompt, cache_salt="two").causes == {"other_scope": 96, "partial_block": 4}


def test_another_pod(pair: Beside) -> None:
    """Blocks that only another pod than the chosen one has are elsewhere."""
    prompt = prompt_of(3)
    ask(pair, prompt, 0)
    assert ask(pair, prompt, 1).causes == {"elsewhere": 96, "partial_block": 4}


def test_eviction(pair: Beside) -> None:
    """Blocks that the engine gave to later prompts are evicted, with the time since."""
    prompt = prompt_of(3)
    ask(pair, prompt)
    for _ in range(2):
        ask(pair, prompt_of(100))
    served = ask(pair, prompt)
    assert served.causes == {"evicted": 96, "partial_block": 4}
    assert served.evicted_s_ago is not None


def test_drafter(executables: Path, tmp_path: Path) -> None:
    """An engine with an EAGLE drafter computes the last matched block again, and the drafter is the cause."""
    with running_beside(Case(llama, EAGLE, eagle_head), executables, tmp_path) as beside:
        prompt = prompt_of(3)
        ask(beside, prompt)
        assert ask(beside, prompt).causes == {"hit": 64, "drafter": 32, "partial_block": 4}


def test_window(executables: Path, tmp_path: Path) -> None:
    """A prefix is not served where the sliding window's blocks in front of its end are gone."""
    with running_beside(Case(hybrid, blocks=_BLOCKS_OF_TWO_GROUPS), executables, tmp_path) as beside:
        prompt = prompt_of(20)
        ask(beside, prompt)
        leaving = [*prompt[: 10 * BLOCK_TOKENS], *prompt_of(1)]
        # The engine keeps the window of the whole prompt's end only.
        assert ask(beside, leaving).causes == {"window": 320, "never_cached": 32, "partial_block": 4}
        # It computed these blocks for both groups.
        assert ask(beside, leaving).causes == {"hit": 352, "partial_block": 4}
