"""The sampler: greedy, filtered and reproducible sampling."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from model_server.requests import SamplingParams
from model_server.worker.sampler import ATTEMPTS, SamplingRow, uniform_draws
from tests.support.model_server.sampling import sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def draw(count: int, **params: float) -> Counter[int]:
    """Sample the same logits at many positions of one request."""
    rows = [SamplingRow(SamplingParams(max_tokens=1, **params), 7, position) for position in range(count)]  # type: ignore[arg-type]
    return Counter(sample(LOGITS.repeat(count, 1), rows))


def test_temperature_zero_is_greedy() -> None:
    """At temperature 0 the most probable token is always sampled."""
    assert draw(20, temperature=0.0) == {4: 20}


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1.0},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -1.0},
        {"presence_penalty": 0.5},
        {"logit_bias": {1: 2.0}},
        {"min_tokens": 1},
        {"allowed_token_ids": frozenset({1})},
        {"logprobs": 0},
    ],
    ids=str,
)
def test_is_greedy_only_without_sampling_features(change: dict[str, Any]) -> None:
    """Plain argmax serves greedy requests without changes of logits and without log probabilities."""
    greedy = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "seed": 7, "ignore_eos": True}
    assert SamplingParams(max_tokens=1, **greedy).is_greedy
    assert not SamplingParams(max_tokens=1, **greedy | change).is_greedy
    row = SamplingRow(SamplingParams(max_tokens=1, **greedy), 7, 0)
    assert sample(LOGITS.flip(0).repeat(2, 1), [row] * 2) == [0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    """Over many draws, frequencies match the softmax at the given temperature."""
    count = 4000
    counts = draw(count, temperature=temperature)
    expected = (LOGITS / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert counts[token] / count == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 4}),
        ({"top_k": -1, "top_p": 0.999999}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.7}, {0, 4}),  # 0.63 + 0.23 crosses 0.7
        ({"top_p": 0.5}, {4}),
        ({"top_p": 1e-9}, {4}),
        ({"min_p": 0.1}, {0, 1, 4}),  # e^-2 is above a tenth, e^-3 below
        ({"min_p": 1.0}, {4}),
        ({"top_k": 3, "top_p": 0.9}, {0, 4}),  # of the three kept tokens, two sum to 0.91
    ],
)
def test_restrictions_keep_the_right_tokens(params: dict[str, float], allowed: set[int]) -> None:
    """top_k, top_p and min_p keep exactly the tokens of their definitions."""
    assert set(draw(3000, **params)) == allowed


def test_the_smallest_top_p_keeps_the_most_probable_token() -> None:
    """A top_p that rounds to 0 in float32 is greedy."""
    row = SamplingRow(SamplingParams(max_tokens=1, top_p=1e-300), 7, 0)
    assert sample(LOGITS.flip(0).unsqueeze(0), [row]) == [0]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """A request draws the same token alone and in any batch."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 100, generator=generator)
    kinds = [{}, {"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 2.0}]
    rows = [
        SamplingRow(SamplingParams(max_tokens=1, **kind), index, 3)  # type: ignore[arg-type]
        for index, kind in enumerate(kinds)
    ]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[index : index + 1].clone(), [row])[0] for index, row in enumerate(rows)]
    backwards = sample(logits.flip(0).clone(), rows[::-1])[::-1]
    assert together == alone == backwards


def test_seeds_and_positions_change_the_draw() -> None:
    """Draws are in [0, 1), repeat for equal seed and position, and differ otherwise."""
    positions = [(seed, position) for seed in range(30) for position in range(30)]
    draws = uniform_draws(positions)
    assert len({*draws.ravel().tolist()}) == draws.size == 900 * len(draws)
    assert 0.0 <= draws.min() <= draws.max() < 1.0
    assert np.array_equal(draws, uniform_draws(positions))
    assert draws.mean(axis=(1, 2)) == pytest.approx([0.5] * len(draws), abs=0.05)


@pytest.mark.parametrize(("extreme", "token"), [(0.0, 1), (1.0 - 2.0**-40, 4)])
def test_extreme_draws_select_kept_tokens(
    monkeypatch: pytest.MonkeyPatch, extreme: float, token: int
) -> None:
    """The smallest and largest draws select the first and last kept token."""
    extremes = np.full((ATTEMPTS + 1, 1, 1), extreme)
    monkeypatch.setattr("model_server.worker.sampler.uniform_draws", lambda positions: extremes)
    logits = torch.tensor([[-9.0, 3.0, -9.0, -9.0, 3.0, -9.0]])
    assert sample(logits, [SamplingRow(SamplingParams(max_tokens=1, top_k=2), 1, 0)]) == [token]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen(temperature: float) -> None:
    """A banned token is never sampled, greedy or not."""
    params = SamplingParams(max_tokens=1, temperature=temperature)
    rows = [SamplingRow(params, 1, position, frozenset({4, 0})) for position in range(200)]
    chosen = set(sample(LOGITS.repeat(200, 1), rows))
    assert not chosen & {0, 4}
    assert chosen


def test_nan_logits_give_a_valid_token() -> None:
    """NaN logits still give a token within the vocabulary."""
    kinds = ({"temperature": 0.0, "logprobs": 1}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5})
    for size in (5, 300):
        for kind in kinds:
            row = SamplingRow(SamplingParams(max_tokens=1, **kind), 1, 0)  # type: ignore[arg-type]
            (token,) = sample(torch.full((1, size), float("nan")), [row])
            assert 0 <= token < size
