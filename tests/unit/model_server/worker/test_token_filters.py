"""Fast paths of the sampler, compared with the plain definitions of the filters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_server.requests import SamplingParams
from model_server.worker.sampler import SamplingRow, uniform_draws
from model_server.worker.token_filters import (
    CANDIDATES,
    draw_by_rejection,
    draw_from_all,
    draw_from_candidates,
    filter_candidates,
    filter_probabilities,
    sample_by_inverse_cdf,
)
from tests.support.depth import examples
from tests.support.model_server.sampling import kept_tokens, sample

CHUNK = 128  # tokens per partial sum
VOCAB_SIZE = 1000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def filter_columns(row_params: list[SamplingParams]) -> Tensor:
    """Return top_k, top_p and min_p of rows: float64 [3, rows, 1]."""
    numbers = [[params.top_k, params.top_p, params.min_p] for params in row_params]
    return torch.tensor(numbers, dtype=torch.float64).T.unsqueeze(-1)


def distribution(seed: int, temperature: float, steps: int, least: int = -18) -> Tensor:
    """Return random probabilities with many ties, powers of two; sums of a few are exact, at -10 of all."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(VOCAB_SIZE, generator=generator) / temperature * steps).round() / steps
    powers = 2.0 ** logits.clamp(least, 4).round()
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
        want = kept_tokens(probabilities[row].tolist(), params)
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
def test_candidates_give_the_token_of_the_full_sort(
    rows: list[SamplingParams], seed: int, temperature: float
) -> None:
    """Candidates give the same token as a full sort where they decide a draw."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) / temperature
    probabilities, filters = logits.softmax(-1), filter_columns(rows)
    draws = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
    tokens = draw_from_all(probabilities, filters, draws)
    few = draw_from_candidates(probabilities, filters, draws)
    assert torch.equal(torch.where(few < 0, tokens, few), tokens)
    assert torch.equal(few < 0, ~filter_candidates(probabilities, filters, CANDIDATES)[2])


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from([0, 3, 40, 700]))
def test_draw_inverts_the_cumulative_probability(seed: int, position: int, top_k: int) -> None:
    """The drawn token is the first whose cumulative probability exceeds the draw, up to rounding."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(max_tokens=1, top_k=top_k)
    token = sample(logits, [SamplingRow(params, seed, position)])[0]
    probabilities = filter_probabilities(logits.softmax(-1), filter_columns([params]))
    cumulated = probabilities[0].double().cumsum(-1)
    draw = uniform_draws([(seed, position)])[-1 if top_k else 0].item()
    target = draw * cumulated[-1].item()
    assert probabilities[0, token] > 0
    assert cumulated[token].item() > target - 1e-12
    assert not token or cumulated[token].item() - probabilities[0, token].item() <= target + 1e-12


@pytest.mark.parametrize("size", [1, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("extreme", [0.0, 1.0 - 2.0**-40])
def test_extreme_draws_reach_both_ends_of_the_vocabulary(size: int, extreme: float) -> None:
    """The smallest draw selects the first token and the largest the last, for any vocabulary size."""
    assert drawn([1.0] * size, extreme) == (size - 1 if extreme else 0)


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
    st.lists(st.sampled_from([1.0, 0.96875, 0.5, 0.0625, 1e-9]), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from([0.05, 0.2, 1.0, 9.0]),
)
def test_single_token_check_agrees_with_the_full_sort(
    top_ps: list[float], seed: int, temperature: float
) -> None:
    """The check of a single token against top_p agrees with the full sort, ties included."""
    rows = [SamplingParams(max_tokens=1, top_p=top_p) for top_p in top_ps]
    probabilities = torch.stack(
        [distribution(seed + row, temperature, 4, least=-10) for row in range(len(rows))]
    )
    wanted = [kept_tokens(row.tolist(), params) for row, params in zip(probabilities, rows, strict=True)]
    cumulated = probabilities.double().cumsum(1)
    for token_id in range(0, VOCAB_SIZE, 7):
        draws = (cumulated[:, token_id] - probabilities[:, token_id] / 2) / cumulated[:, -1]
        tokens = draw_by_rejection(probabilities, filter_columns(rows), draws[:, None])
        assert tokens.tolist() == [token_id if token_id in left else -1 for left in wanted]


@pytest.mark.parametrize("params", [{"top_k": 5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_rows_with_other_filters_are_not_drawn_by_rejection(params: dict[str, float]) -> None:
    """A row with top_k or min_p is left to the filters."""
    filters = filter_columns([SamplingParams(max_tokens=1, **params)])  # type: ignore[arg-type]
    assert draw_by_rejection(torch.ones(1, 10), filters, torch.zeros(1, 1).double()).tolist() == [-1]


def test_top_p_rejects_tokens_beyond_it_unless_it_is_1() -> None:
    """A token is kept if the more probable ones sum to less than top_p, or if top_p is 1."""
    filters = filter_columns([SamplingParams(max_tokens=1, top_p=0.5)] * 4)
    draws = (torch.arange(4, dtype=torch.float64)[:, None] + 0.5) / 4
    assert draw_by_rejection(torch.ones(4, 4), filters, draws).tolist() == [0, 1, -1, -1]
    filters = filter_columns([SamplingParams(max_tokens=1)])
    rounded_down = torch.tensor([[1e-9, 1.0]])  # their sum is 1 in float32
    assert draw_by_rejection(rounded_down, filters, torch.zeros(1, 1).double()).tolist() == [0]


def drawn(probabilities: list[float], draw: float) -> int:
    """Draw one token."""
    return int(
        sample_by_inverse_cdf(torch.tensor([probabilities]), torch.tensor([[draw]], dtype=torch.float64))
    )


def test_draw_on_a_border_selects_the_next_token() -> None:
    """A token's draws are [cumulative before it, cumulative with it)."""
    size = 2 * CHUNK
    for token in range(size):
        assert drawn([1.0] * size, token / size) == token


def test_draw_beyond_a_chunk_selects_its_last_possible_token() -> None:
    """A draw beyond a chunk's end, after rounding, selects its last token with a probability above 0."""
    # In float32 the sum of a chunk exceeds that in float64.
    rounded_up = [2.0**24, *[1.0 + 2.0**-20] * 3, *[0.0] * (CHUNK - 4)]
    assert drawn(rounded_up, 1.0 - 2.0**-40) == 3


@pytest.mark.parametrize("top_p", [0.9, 0.3, 0.02])
def test_frequencies_match_the_renormalised_top_p_probabilities(top_p: float) -> None:
    """Frequencies match the renormalised probabilities, whatever the number of rejections."""
    count = 3000
    logits = torch.linspace(3.0, 0.0, VOCAB_SIZE)
    params = SamplingParams(max_tokens=1, top_p=top_p)
    rows = [SamplingRow(params, 5, position) for position in range(count)]
    tokens = torch.tensor(sample(logits.repeat(count, 1), rows))
    (left,) = filter_probabilities(logits.softmax(-1)[None], filter_columns([params]))
    assert left[tokens].all()
    cumulated = left.double().cumsum(0) / left.double().sum()
    counted = torch.bincount(tokens, minlength=VOCAB_SIZE).cumsum(0) / count
    assert (cumulated - counted).abs().max() < 0.04
