"""Fast paths of the sampler, compared with the plain definitions of the filters."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_server.requests import SamplingParams
from model_server.worker.draw import CHUNK, draw, exponentiate
from model_server.worker.sampler import (
    SamplingRow,
    filter_candidates,
    filter_columns,
    filter_probabilities,
    sample,
    uniform_draw,
)
from tests.support.depth import examples

VOCAB_SIZE = 1000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def by_definition(probabilities: list[float], params: SamplingParams) -> set[int]:
    """Return the tokens that the filters keep in one row, computed token by token."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    least = params.min_p * probabilities[order[0]]
    order = [token for token in order if probabilities[token] >= least and probabilities[token] > 0]
    total, before, chosen = sum(probabilities[token] for token in order), 0.0, set()
    for token in order:
        if chosen and before >= params.top_p * total:
            break
        chosen.add(token)
        before += probabilities[token]
    return chosen


def distribution(seed: int, temperature: float, steps: int) -> Tensor:
    """Return random probabilities with many ties; sums of a few of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(VOCAB_SIZE, generator=generator) / temperature * steps).round() / steps
    powers = 2.0 ** logits.clamp(-18, 4).round()
    return powers / 2.0 ** torch.log2(powers.sum()).ceil()


wishes = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    top_k=st.sampled_from([0, 1, 5, 255, 256, 257, 600, 5000]),
    top_p=st.sampled_from([1.0, 0.96875, 0.5, 0.0625, 1e-9]),
    min_p=st.sampled_from([0.0, 0.25, 2.0**-10]),
)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(wishes, min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([0.05, 0.2, 1.0, 9.0])
)
def test_filters_match_their_definition(rows: list[SamplingParams], seed: int, temperature: float) -> None:
    """The filters keep the tokens of their definition for all parameters and any number of ties."""
    probabilities = torch.stack([distribution(seed + row, temperature, 4) for row in range(len(rows))])
    masks = [(filter_probabilities(probabilities, filter_columns(rows)), [True] * len(rows))]
    for candidates in (2, 256, VOCAB_SIZE - 1):
        token_ids, left, sure = filter_candidates(probabilities, filter_columns(rows), candidates)
        assert torch.equal(token_ids, token_ids.sort(dim=-1).values)
        masks.append((torch.zeros_like(probabilities).scatter_(1, token_ids, left), sure.tolist()))
    for row, params in enumerate(rows):
        want = by_definition(probabilities[row].tolist(), params)
        for got in [left[row] for left, sure in masks if sure[row]]:
            assert {*got.nonzero().flatten().tolist()} == want
            assert torch.equal(got[got > 0], probabilities[row][got > 0])


def test_candidates_suffice_for_peaked_distributions() -> None:
    """The candidates suffice for a peaked distribution; a flat one needs the full sort."""
    params = [SamplingParams(max_tokens=1, top_p=0.95), SamplingParams(max_tokens=1, top_k=40)]
    filters = filter_columns(params)
    sharp = (4 * torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).softmax(-1)
    assert filter_candidates(sharp, filters, 256)[2].tolist() == [True, True]
    flat = torch.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE)
    assert filter_candidates(flat, filters, 256)[2].tolist() == [False, False]


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(wishes, min_size=1, max_size=5), st.integers(0, 2**32), st.sampled_from([0.02, 0.3, 3.0]))
def test_fast_paths_match_the_full_sort(rows: list[SamplingParams], seed: int, temperature: float) -> None:
    """Every fast path, alone or in a batch, draws the same token as a full sort."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) / temperature
    asked = [SamplingRow(params, seed, position) for position, params in enumerate(rows)]
    drawn = []
    for candidates, at_once in ((VOCAB_SIZE + 1, 1 << 20), (2, 1 << 20), (256, VOCAB_SIZE)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("model_server.worker.sampler.CANDIDATES", candidates)
            patch.setattr(
                "model_server.worker.sampler.filter_candidates",
                partial(filter_candidates, candidates=min(candidates, VOCAB_SIZE)),
            )
            patch.setattr("model_server.worker.sampler.CPU_BATCH_LOGITS", at_once)
            drawn.append(sample(logits.clone(), asked))
    assert drawn[0] == drawn[1] == drawn[2] == sample(logits.clone(), asked)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from([0, 3, 40, 700]))
def test_draw_inverts_the_cumulative_probability(seed: int, position: int, top_k: int) -> None:
    """The drawn token is the first whose cumulative probability exceeds the draw, up to rounding."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(max_tokens=1, top_k=top_k)
    token = sample(logits.clone(), [SamplingRow(params, seed, position)])[0]
    probabilities = filter_probabilities(logits.softmax(-1), filter_columns([params]))
    cumulated = probabilities[0].double().cumsum(-1)
    target = uniform_draw(seed, position) * cumulated[-1].item()
    assert probabilities[0, token] > 0
    assert cumulated[token].item() > target - 1e-12
    assert not token or cumulated[token].item() - probabilities[0, token].item() <= target + 1e-12


@pytest.mark.parametrize("size", [1, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2.0**-40])
def test_extreme_draws_reach_both_ends_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, size: int, extreme: float
) -> None:
    """The smallest draw selects the first token and the largest the last, for any vocabulary size."""
    monkeypatch.setattr("model_server.worker.sampler.uniform_draw", lambda seed, position: extreme)
    row = SamplingRow(SamplingParams(max_tokens=1), 1, 0)
    assert sample(torch.zeros(1, size), [row]) == [size - 1 if extreme else 0]


@pytest.mark.parametrize("temperature", [1e30, 3.4028235677973366e38, 1e300])
@pytest.mark.parametrize("top_k", [0, 3])
def test_banned_tokens_stay_banned_at_any_temperature(temperature: float, top_k: int) -> None:
    """A token with logit minus infinity is never drawn, even at temperatures beyond float32."""
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    logits[0, 700] = 1.0
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k)
    assert sample(logits, [SamplingRow(params, 1, 0)]) == [700]


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.sampled_from([0.96875, 0.5, 0.0625, 1e-9]), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from([0.05, 0.2, 1.0, 9.0]),
)
def test_single_token_check_agrees_with_the_full_sort(
    top_ps: list[float], seed: int, temperature: float
) -> None:
    """The check of a single token against top_p agrees with the full sort, ties included."""
    rows = [SamplingParams(max_tokens=1, top_p=top_p) for top_p in top_ps]
    probabilities = torch.stack([distribution(seed + row, temperature, 4) for row in range(len(rows))])
    wanted = [by_definition(row.tolist(), params) for row, params in zip(probabilities, rows, strict=True)]
    padded = torch.nn.functional.pad(probabilities, (0, -VOCAB_SIZE % CHUNK)).double()
    sums, cumulated = padded.unflatten(1, (-1, CHUNK)).sum(-1), probabilities.double().cumsum(1)
    at, shares = np.arange(len(rows)), np.array(top_ps)
    for token_id in range(0, VOCAB_SIZE, 7):
        draws = (cumulated[:, token_id] - probabilities[:, token_id] / 2) / cumulated[:, -1]
        tokens = np.zeros(len(rows), np.int64)
        draw(probabilities.numpy(), sums.numpy(), at, draws.numpy(), shares, tokens)
        assert tokens.tolist() == [token_id if token_id in left else -1 for left in wanted]


def drawn(probabilities: list[float], sums: list[float], at: float, top_p: float = 1.0) -> int:
    """Draw one token; -1 if top_p rejects it."""
    row, tokens = np.array([probabilities], np.float32), np.zeros(1, np.int64)
    draw(row, np.array([sums]), np.zeros(1, np.int64), np.array([at]), np.array([top_p]), tokens)
    return int(tokens[0])


def test_draw_on_a_border_selects_the_next_token() -> None:
    """A token's draws are [cumulative before it, cumulative with it)."""
    size = 2 * CHUNK
    for token in range(size):
        assert drawn([1.0] * size, [float(CHUNK)] * 2, token / size) == token


def test_draw_beyond_a_chunk_selects_its_last_possible_token() -> None:
    """A draw beyond a chunk's end, after rounding, selects its last token with a probability above 0."""
    assert drawn([1.0] * 3 + [0.0] * (CHUNK - 3), [3.5], 0.99) == 2


def test_top_p_rejects_tokens_beyond_it_unless_it_is_1() -> None:
    """A token is kept if the more probable ones sum to less than top_p, or if top_p is 1."""
    assert [drawn([1.0] * 4, [4.0], (token + 0.5) / 4, top_p=0.5) for token in range(4)] == [0, 1, -1, -1]
    rounded_down = [2.0]
    assert drawn([0.001, 1.0, 1.0], rounded_down, 0.0) == 0


def test_powers_have_float32_precision() -> None:
    """Powers are accurate to a few parts in ten million between any two powers of two."""
    weights = np.linspace(-3.0, 0.0, VOCAB_SIZE, dtype=np.float32)[None]
    exact = np.exp(weights.astype(np.float64))
    exponentiate(weights, np.ones(1, np.float32))
    np.testing.assert_allclose(weights, exact, rtol=1e-6)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from([1, 127, 128, 129, 1000]),
    st.integers(0, 2**32),
    st.sampled_from([1e-5, 0.05, 1.0, 1e30]),
    st.sampled_from([0.0, 1.0, 30.0, 1e4]),
)
def test_weights_match_the_softmax(size: int, seed: int, temperature: float, spread: float) -> None:
    """Weights are proportional to torch's softmax for all logits and temperatures; banned tokens get 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, size, generator=generator)
    logits[:, 1::5] = float("-inf")
    wanted = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperature).softmax(1)
    sums = exponentiate(logits.numpy(), np.full(3, temperature, np.float32))
    weights = logits.double()
    assert torch.allclose(weights / torch.from_numpy(sums).sum(1, keepdim=True), wanted, rtol=1e-4, atol=1e-9)
    assert not weights[:, 1::5].any()


@pytest.mark.parametrize("top_p", [0.9, 0.3, 0.02])
def test_frequencies_match_the_renormalised_top_p_probabilities(top_p: float) -> None:
    """Frequencies match the renormalised probabilities, whatever the number of rejections."""
    count = 3000
    logits = torch.linspace(3.0, 0.0, VOCAB_SIZE)
    params = SamplingParams(max_tokens=1, top_p=top_p)
    rows = [SamplingRow(params, 5, position) for position in range(count)]
    drawn = torch.tensor(sample(logits.repeat(count, 1), rows))
    (left,) = filter_probabilities(logits.softmax(-1)[None], filter_columns([params]))
    assert left[drawn].all()
    cumulated = left.double().cumsum(0) / left.double().sum()
    counted = torch.bincount(drawn, minlength=VOCAB_SIZE).cumsum(0) / count
    assert (cumulated - counted).abs().max() < 0.04
