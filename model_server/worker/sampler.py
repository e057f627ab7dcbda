"""Sampling of the next token of each row from its logits, with log probabilities.

Order: penalties, logit biases, bans; then top_k and min_p, and top_p as a fraction of what these two keep.
Ties go to lower token ids. A row's draw depends only on its seed and position, not on preemption or on the
rest of the batch.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_server.requests import GREEDY_BELOW, SamplingParams, TokenLogprobs
from model_server.worker.draw import draw, exponentiate

# Higher temperatures are uniform anyway; an infinite one would make a banned token's probability NaN.
_TEMPERATURE_MAX = 1e30
_CHUNK = 128  # tokens
# Attempts at rejection sampling for top_p; with usual values a second one is rarely needed.
_ATTEMPTS = 3
# Probabilities per pass on a CPU. With many more, each of a dozen operations would allocate memory from the
# operating system, which takes longer than the operation.
CPU_BATCH_LOGITS = 1 << 20
# Top tokens to filter; nearly always enough. Sorting the whole vocabulary takes ten times as long.
CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Sampling state of one row."""

    params: SamplingParams
    seed: int  # seed of its random draws
    position: int  # tokens generated before this one
    banned: frozenset[int] = frozenset()  # tokens that must not be sampled now
    token_ids: Sequence[int] = ()  # prompt and output tokens; the last `position` are output
    allowed_bits: bytes | None = None  # see `TokenConstraint.compute_bitmask`; None allows all


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Sample one token per row of float32 logits [rows, vocab_size], modified in place."""
    apply_logit_processors(logits, rows)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    tokens = argmax_tokens(logits) if len(random) < len(rows) else [0] * len(rows)
    at_once = max(1, CPU_BATCH_LOGITS // logits.shape[-1] if logits.device.type == "cpu" else len(logits))
    for first in range(0, len(random), at_once):
        batch = random[first : first + at_once]
        # The draw modifies its input; avoid the copy if all rows are drawn.
        chosen = logits if len(batch) == len(logits) else logits[batch]
        drawn = _draw(chosen, [rows[index] for index in batch])
        for index, token in zip(batch, drawn, strict=True):
            tokens[index] = token
    return tokens


def argmax_tokens(logits: Tensor) -> list[int]:
    """Return the token with the largest logit of each row, float32 [rows, vocab_size]."""
    # On a CPU, numpy is ten times as fast as torch here.
    found = logits.numpy().argmax(axis=-1) if logits.device.type == "cpu" else logits.argmax(dim=-1)
    return [int(token) for token in found.tolist()]


def uniform_draw(seed: int, position: int) -> float:
    """Return a uniform draw in [0, 1) for one position: a hash, so that no state is needed."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 40 bits: the product with a total always rounds to less than the total.
    return (int.from_bytes(digest, "big") >> 24) / (1 << 40)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token per row, replacing the logits by unnormalised probabilities.

    In place, because allocating the memory would take longer than the computation.
    """
    temperatures = [min(row.params.temperature, _TEMPERATURE_MAX) for row in rows]
    if logits.device.type == "cpu":
        tokens = _draw_on_cpu(logits.numpy(), temperatures, rows)
    else:
        divisors = torch.tensor(temperatures, device=logits.device)[:, None]
        logits.div_(divisors).sub_(logits.amax(dim=-1, keepdim=True)).exp_()
        drawn = _sample_by_inverse_cdf(logits, [_draw_value(row, 0) for row in rows]).tolist()
        tokens = [
            token if _only_top_p(row.params) and row.params.top_p >= 1.0 else -1
            for row, token in zip(rows, drawn, strict=True)
        ]
    rest = [index for index, token in enumerate(tokens) if token < 0]
    if rest:
        drawn = _draw_filtered(logits[rest], [rows[index] for index in rest]).tolist()
        for index, token in zip(rest, drawn, strict=True):
            tokens[index] = token
    return tokens


def _draw_on_cpu(
    logits: NDArray[np.float32], temperatures: Sequence[float], rows: Sequence[SamplingRow]
) -> list[int]:
    """Draw for rows with top_p alone or no filter; -1 for other rows and after too many rejections."""
    sums = exponentiate(logits, np.array(temperatures, np.float32))
    top_ps = np.array([row.params.top_p for row in rows])
    tokens = np.full(len(rows), -1, np.int64)
    remaining = [index for index, row in enumerate(rows) if _only_top_p(row.params)]
    for attempt in range(_ATTEMPTS):
        if not remaining:
            break
        draws = np.array([_draw_value(rows[index], attempt) for index in remaining])
        draw(logits, sums, np.array(remaining, np.int64), draws, top_ps, tokens)
        remaining = [index for index in remaining if tokens[index] < 0]
    return [int(token) for token in tokens.tolist()]


def _only_top_p(params: SamplingParams) -> bool:
    return params.top_k <= 0 and params.min_p <= 0.0


def _draw_value(row: SamplingRow, attempt: int) -> float:
    # Seeds have 64 bits, so the seeds of later attempts belong to no other request.
    return uniform_draw(row.seed + (attempt << 64), row.position)


def _draw_filtered(probabilities: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw one token per row from the tokens that the filters keep.

    Inverts the CDF in the order of token ids. In the order of probability, rounding could swap neighbours, so
    that the same draw gives another token in another batch.
    """
    params = [row.params for row in rows]
    draws = [_draw_value(row, _ATTEMPTS if _only_top_p(row.params) else 0) for row in rows]
    if probabilities.shape[-1] < CANDIDATES:
        return _sample_by_inverse_cdf(filter_probabilities(probabilities, params), draws)
    token_ids, kept, is_exact = filter_candidates(probabilities, params)
    tokens = token_ids.gather(1, _sample_by_inverse_cdf(kept, draws)[:, None]).squeeze(1)
    inexact = (~is_exact).nonzero().flatten().tolist()
    # On a CPU, one row at a time: sorting rows together gains nothing.
    at_once = 1 if probabilities.device.type == "cpu" else len(rows)
    for first in range(0, len(inexact), at_once):
        batch = inexact[first : first + at_once]
        kept = filter_probabilities(probabilities[batch], [params[index] for index in batch])
        tokens[batch] = _sample_by_inverse_cdf(kept, [draws[index] for index in batch])
    return tokens


def _sample_by_inverse_cdf(probabilities: Tensor, draws: Sequence[float]) -> Tensor:
    """Return per row the first index at which the cumulative probability exceeds draw x total.

    First finds the chunk of the vocabulary, then the token in it: a cumulative sum of the whole vocabulary
    would take as long as sorting the top tokens.
    """
    size = probabilities.shape[-1]
    whole = probabilities[:, : size - size % _CHUNK].unflatten(-1, (-1, _CHUNK))
    rest = probabilities[:, size - size % _CHUNK :]
    # Sum each chunk in float32, only the chunks in float64: float64 for all takes five times as long.
    sums = [part.sum(dim=-1, keepdim=part is rest) for part in (whole, rest)]
    cumulative = torch.cat(sums, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(draws, dtype=torch.float64, device=probabilities.device)[:, None]
    targets = targets * cumulative[:, -1:]
    at = torch.searchsorted(cumulative, targets, right=True).clamp_(max=(size - 1) // _CHUNK)
    before = torch.where(at > 0, cumulative.gather(1, (at - 1).clamp_(min=0)), 0.0)
    ids = at * _CHUNK + torch.arange(_CHUNK, device=at.device)
    chunk = torch.where(ids < size, probabilities.gather(1, ids.clamp(max=size - 1)), 0.0)
    found = torch.searchsorted(chunk.cumsum(dim=-1, dtype=torch.float64), targets - before, right=True)
    # If rounding puts a draw beyond the chunk's end, use its last token with a probability above 0.
    last = (torch.arange(_CHUNK, device=chunk.device) * (chunk > 0)).amax(dim=-1, keepdim=True)
    return (at * _CHUNK + torch.minimum(found, last)).squeeze(1)


def apply_logit_processors(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply penalties, biases and bans in place to float32 logits [rows, vocab_size]."""
    for index, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            _apply_penalties(logits[index], row)
        if params.logit_bias:
            at = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[index, at] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.allowed_token_ids is not None:
            _ban_all_but(logits[index], torch.tensor(sorted(params.allowed_token_ids), device=logits.device))
        if row.allowed_bits is not None:
            _ban_all_but(logits[index], _set_bits(row.allowed_bits, logits.shape[1]).to(logits.device))
        if row.banned:
            logits[index, sorted(row.banned)] = -math.inf


def _apply_penalties(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids, device=logits.device).unique()
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.position and (params.frequency_penalty or params.presence_penalty):
        generated = torch.tensor(row.token_ids[-row.position :], device=logits.device)
        generated_ids, counts = generated.unique(return_counts=True)
        logits[generated_ids] -= params.frequency_penalty * counts + params.presence_penalty


def _ban_all_but(logits: Tensor, token_ids: Tensor) -> None:
    kept = logits[token_ids]
    logits.fill_(-math.inf)
    logits[token_ids] = kept


def _set_bits(bits: bytes, vocab_size: int) -> Tensor:
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    return torch.from_numpy(np.flatnonzero(flags[:vocab_size]))


def compute_logprobs(logits: Tensor, counts: Sequence[int | None]) -> Tensor:
    """Return log probabilities of the rows whose count is not None: float32 [those rows, vocab_size].

    `counts` has the number of top tokens requested per row. Call it before `sample`, which modifies logits.
    """
    return logits[[count is not None for count in counts]].log_softmax(dim=-1)


def gather_logprobs(
    logprobs: Tensor, counts: Sequence[int | None], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Return the sampled tokens' `TokenLogprobs`, one per row; None if not requested."""
    pairs = zip(counts, token_ids, strict=True)
    asked = [(count, token_id) for count, token_id in pairs if count is not None]
    if not asked:
        return [None] * len(counts)
    chosen = logprobs.gather(1, torch.tensor([[token_id] for _, token_id in asked], device=logprobs.device))
    top = logprobs.topk(max(count for count, _ in asked), dim=-1)
    entries = iter(
        TokenLogprobs(own, tuple(zip(best_ids[:count], best[:count], strict=True)))
        for (count, _), (own,), best_ids, best in zip(
            asked, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    )
    return [None if count is None else next(entries) for count in counts]


def filter_probabilities(probabilities: Tensor, row_params: Sequence[SamplingParams]) -> Tensor:
    """Return probabilities, float32 [rows, vocab_size], with 0 for tokens that the filters remove."""
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = ordered * _top_k_min_p_mask(ordered, row_params)
    return torch.zeros_like(kept).scatter_(1, token_ids, kept * _top_p_mask(kept, _row_sum(kept), row_params))


def filter_candidates(
    probabilities: Tensor, row_params: Sequence[SamplingParams], candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `filter_probabilities` to the most probable tokens only.

    Args:
        probabilities: float32 [rows, vocab_size].
        row_params: Sampling parameters per row.
        candidates: Number of tokens to examine, below the vocabulary size.

    Returns:
        Ascending token ids [rows, candidates], their probabilities or 0, and bool [rows]: whether the
        result is exact, i.e. the filters keep no other token.
    """
    token_ids = probabilities.topk(candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    best = probabilities.gather(1, token_ids)
    ordered, at = best.sort(dim=-1, descending=True, stable=True)
    kept = ordered * _top_k_min_p_mask(ordered, row_params)
    top_k = _param_column(row_params, ordered, lambda params: params.top_k)
    total = torch.where(top_k > 0, _row_sum(kept), _min_p_total(probabilities, ordered[:, :1], row_params))
    keep = _top_p_mask(kept, total, row_params)
    # Tokens beyond the candidates are at most as probable as the last candidate, but may be equal to it.
    last = ordered.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
    is_exact = (last > ordered[:, -1:]) & (top_k <= candidates)
    return token_ids, torch.zeros_like(best).scatter_(1, at, kept * keep), is_exact.squeeze(1)


def _top_k_min_p_mask(ordered: Tensor, row_params: Sequence[SamplingParams]) -> Tensor:
    """Return the mask of top_k and min_p for probabilities in descending order."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    top_k = _param_column(row_params, ordered, lambda params: params.top_k if params.top_k > 0 else math.inf)
    threshold = _param_column(row_params, ordered, lambda params: params.min_p) * ordered[:, :1]
    return (ranks < top_k) & (ordered >= threshold)


def _top_p_mask(kept: Tensor, total: Tensor, row_params: Sequence[SamplingParams]) -> Tensor:
    """Return the mask of top_p: the first tokens that make up the fraction top_p of the total."""
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    keep = (kept > 0) & (before < _param_column(row_params, kept, lambda params: params.top_p) * total)
    keep[:, 0] = True  # a top_p that rounds to 0 in float32 still keeps the most probable token
    return keep


def _min_p_total(probabilities: Tensor, largest: Tensor, row_params: Sequence[SamplingParams]) -> Tensor:
    """Return the sum of the probabilities that min_p keeps."""
    if not any(params.min_p > 0.0 for params in row_params):
        return _row_sum(probabilities)
    threshold = _param_column(row_params, largest, lambda params: params.min_p) * largest
    return _row_sum(torch.where(probabilities >= threshold, probabilities, 0.0))


def _row_sum(kept: Tensor) -> Tensor:
    # In float64: at top_p 1, rounding in float32 would remove tokens.
    return kept.sum(dim=-1, keepdim=True, dtype=torch.float64)


def _param_column(
    row_params: Sequence[SamplingParams], like: Tensor, value: Callable[[SamplingParams], float]
) -> Tensor:
    return torch.tensor([[float(value(params))] for params in row_params], device=like.device)
