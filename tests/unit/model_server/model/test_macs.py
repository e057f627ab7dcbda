"""Operation counts of `kvroute bench macs`: the closed forms, step by step, on the engine's decoder."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.macs import Step, cached_macs, generate, new_model, uncached_macs
from model_server.model.decoder import Decoder

WIDTH = 32
PROMPT = [5, 17, 300, 2, 44, 9, 121]
STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def model() -> Decoder:
    """Return the model, built once."""
    return new_model(WIDTH, layers=4)


def taken(*, cached: bool, block_tokens: int = 1) -> list[Step]:
    """Generate a few tokens."""
    return generate(model(), PROMPT, STEPS, block_tokens, cached=cached)


def test_without_a_cache_each_step_computes_the_whole_text() -> None:
    """An uncached step costs 4sD^2 + 2s^2D per layer, with s tokens so far."""
    layers = model().shape.layers
    steps = taken(cached=False)
    assert [step.tokens for step in steps] == [len(PROMPT) + number for number in range(STEPS)]
    for step in steps:
        assert step.attention_macs == layers * uncached_macs(step.tokens, WIDTH)


def test_with_a_cache_each_step_computes_one_token() -> None:
    """After the prompt a cached step costs 4D^2 + 2sD per layer."""
    layers = model().shape.layers
    first, *rest = taken(cached=True)
    assert first.attention_macs == layers * uncached_macs(len(PROMPT), WIDTH)
    for step in rest:
        assert step.attention_macs == layers * cached_macs(step.tokens, WIDTH)


def test_blocks_cost_nothing() -> None:
    """With blocks of several tokens, a decode attends to its tokens, not to whole blocks."""
    for step in taken(cached=True, block_tokens=4)[1:]:
        assert step.attention_macs == model().shape.layers * cached_macs(step.tokens, WIDTH)


def test_both_generate_the_same_tokens() -> None:
    """With and without the cache the generated tokens are equal."""
    without, cached = (taken(cached=kept) for kept in (False, True))
    assert [step.next_token for step in without] == [step.next_token for step in cached]


def test_the_rest_of_the_model_is_counted_separately() -> None:
    """MLP and output head are not part of attention, and are counted per token of a step."""
    shape = model().shape
    for step in taken(cached=False):
        mlp = 3 * shape.intermediate * WIDTH * shape.layers
        assert step.other_macs == step.tokens * (mlp + shape.vocab_size * WIDTH)


def test_textbook_example() -> None:
    """One layer of width 64 that continues 16 tokens by 48 saves 32.0 times of attention's operations."""
    prompt = list(range(16))
    uncached, cached = (
        sum(step.attention_macs for step in generate(new_model(64, 1), prompt, 48, 1, cached=kept))
        for kept in (False, True)
    )
    assert (uncached, cached) == (41_829_376, 1_305_600)
    assert round(uncached / cached, 1) == 32.0
