"""Sampling of the next token of each row from its logits on a CPU, with log probabilities.

Order: penalties, logit biases, bans; then top_k and min_p, and top_p as a fraction of what these two keep.
Ties go to lower token ids. A row's draw depends only on its seed and position, not on preemption or on the
rest of the batch. `device_sampler` samples the same tokens on a GPU.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_server.requests import GREEDY_BELOW, SamplingParams, TokenLogprobs
from model_server.worker.draw import draw, exponentiate

# Higher temperatures are uniform anyway; an infinite one would make a banned token's probability NaN.
TEMPERATURE_MAX = 1e30
_CHUNK = 128  # tokens
# Attempts at rejection sampling for top_p; with usual values a second one is rarely needed.
ATTEMPTS = 3
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
    arrival_index: int = 0  # identifies its request; `sample` does not need it


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Sample one token per row of float32 logits [rows, vocab_size] on the CPU, modified in place."""
    apply_logit_processors(logits, rows)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    tokens = argmax_tokens(logits) if len(random) < len(rows) else [0] * len(rows)
    at_once = max(1, CPU_BATCH_LOGITS // logits.shape[-1])
    for first in range(0, len(random), at_once):
        batch = random[first : first + at_once]
        # The draw modifies its input; avoid the copy if all rows are drawn.
        chosen = logits if len(batch) == len(logits) else logits[batch]
        drawn = _draw(chosen, [rows[index] for index in batch])
        for index, token in zip(batch, drawn, strict=True):
            tokens[index] = token
    return tokens


def argmax_tokens(logits: Tensor) -> list[int]:
    """Return the token with the largest logit of each row, float32 [rows, vocab_size] on the CPU."""
    # numpy is ten times as fast as torch here.
    return [int(token) for token in logits.numpy().argmax(axis=-1).tolist()]


def uniform_draw(seed: int, position: int) -> float:
    """Return a uniform draw in [0, 1) for one position: a hash, so that no state is needed."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 40 bits: the product with a total always rounds to less than the total.
    return (int.from_bytes(digest, "big") >> 24) / (1 << 40)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token per row, replacing the logits by unnormalised probabilities.

    In place, because allocating the memory would take longer than the computation.
    """
    tokens = _draw_by_rejection(logits.numpy(), rows)
    rest = [index for index, token in enumerate(tokens) if token < 0]
    if rest:
        drawn = _draw_filtered(logits[rest], [rows[index] for index in rest])
        for index, token in zip(rest, drawn, strict=True):
            tokens[index] = token
    return tokens


def _draw_by_rejection(logits: NDArray[np.float32], rows: Sequence[SamplingRow]) -> list[int]:
    """Draw for rows with top_p alone or no filter; -1 for other rows and after too many rejections."""
    temperatures = [min(row.params.temperature, TEMPERATURE_MAX) for row in rows]
    sums = exponentiate(logits, np.array(temperatures, np.float32))
    top_ps = np.array([row.params.top_p for row in rows])
    tokens = np.full(len(rows), -1, np.int64)
    remaining = [index for index, row in enumerate(rows) if num_attempts(row.params)]
    for attempt in range(ATTEMPTS):
        if not remaining:
            break
        draws = np.array([draw_value(rows[index], attempt) for index in remaining])
        draw(logits, sums, np.array(remaining, np.int64), draws, top_ps, tokens)
        remaining = [index for index in remaining if tokens[index] < 0]
    return [int(token) for token in tokens.tolist()]


def num_attempts(params: SamplingParams) -> int:
    """Return the attempts at rejection sampling: none with top_k or min_p, one without any filter."""
    return 0 if params.top_k > 0 or params.min_p > 0.0 else 1 if params.top_p >= 1.0 else ATTEMPTS


def draw_value(row: SamplingRow, attempt: int) -> float:
    """Return the uniform draw of one attempt at rejection sampling."""
    # Seeds have 64 bits, so the seeds of later attempts belong to no other request.
    return uniform_draw(row.seed + (attempt << 64), row.position)


def _draw_filtered(probabilities: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token per row from the tokens that the filters keep."""
    filters = filter_columns([row.params for row in rows])
    values = [[draw_value(row, num_attempts(row.params))] for row in rows]
    draws = torch.tensor(values, dtype=torch.float64)
    tokens: list[int] = draw_from_candidates(probabilities, filters, draws).tolist()
    for index, token in enumerate(tokens):
        if token < 0:  # one row at a time: sorting rows together gains nothing
            at = [index]
            tokens[index] = int(draw_from_all(probabilities[at], filters[:, at], draws[at]).item())
    return tokens


def draw_from_candidates(probabilities: Tensor, filters: Tensor, draws: Tensor) -> Tensor:
    """Draw one token per row from what the filters keep, as far as the most probable tokens decide it.

    Inverts the CDF in the order of token ids. In the order of probability, rounding could swap neighbours, so
    that the same draw gives another token in another batch.

    Args:
        probabilities: float32 [rows, vocab_size], unnormalised.
        filters: See `filter_columns`.
        draws: float64 [rows, 1], at least 0 and below 1.

    Returns:
        int64 [rows]; -1 where only `draw_from_all` can tell.
    """
    if probabilities.shape[-1] < CANDIDATES:
        return draw_from_all(probabilities, filters, draws)
    token_ids, kept, is_exact = filter_candidates(probabilities, filters)
    tokens = token_ids.gather(1, sample_by_inverse_cdf(kept, draws)[:, None]).squeeze(1)
    return torch.where(is_exact, tokens, -1)


def draw_from_all(probabilities: Tensor, filters: Tensor, draws: Tensor) -> Tensor:
    """Draw like `draw_from_candidates`, but from the sorted vocabulary."""
    return sample_by_inverse_cdf(filter_probabilities(probabilities, filters), draws)


def sample_by_inverse_cdf(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Return per row, int64 [rows], the first index at which the cumulative probability exceeds draw x total.

    First finds the chunk of the vocabulary, then the token in it: a cumulative sum of the whole vocabulary
    would take as long as sorting the top tokens.
    """
    size = probabilities.shape[-1]
    whole = probabilities[:, : size - size % _CHUNK].unflatten(-1, (-1, _CHUNK))
    rest = probabilities[:, size - size % _CHUNK :]
    # Sum each chunk in float32, only the chunks in float64: float64 for all takes five times as long.
    sums = [part.sum(dim=-1, keepdim=part is rest) for part in (whole, rest)]
    cumulative = torch.cat(sums, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = draws * cumulative[:, -1:]
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
        if params.has_penalties:
            _apply_penalties(logits[index], row)
        if params.logit_bias:
            logits[index, list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            _ban_all_but(logits[index], torch.tensor(sorted(params.allowed_token_ids)))
        if row.allowed_bits is not None:
            _ban_all_but(logits[index], _set_bits(row.allowed_bits, logits.shape[1]))
        if row.banned:
            logits[index, sorted(row.banned)] = -math.inf


def _apply_penalties(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids).unique()
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.position and (params.frequency_penalty or params.presence_penalty):
        generated = torch.tensor(row.token_ids[-row.position :])
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
    asked = [token_id for count, token_id in zip(counts, token_ids, strict=True) if count is not None]
    tables = [tabulate_logprobs(logprobs, torch.tensor(asked), counts)] if asked else []
    return as_token_logprobs(tables, counts)


def tabulate_logprobs(logprobs: Tensor, token_ids: Tensor, counts: Sequence[int | None]) -> Tensor:
    """Return log probabilities of sampled tokens and of top tokens, and the ids of these, as one tensor.

    It has the rows whose count is not None: float64 [those rows, 1 + 2 x largest count].
    """
    top = logprobs.topk(max(count for count in counts if count is not None), dim=-1)
    return torch.cat((logprobs.gather(1, token_ids[:, None]).double(), top.values, top.indices), dim=1)


def as_token_logprobs(tables: Sequence[Tensor], counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Return one entry per row from the table of `tabulate_logprobs`, if any; None if not requested."""
    lines = (line for table in tables for line in table.tolist())
    return [None if count is None else _read_line(next(lines), count) for count in counts]


def _read_line(line: list[float], count: int) -> TokenLogprobs:
    own, values, token_ids = line[0], line[1:], map(int, line[1 + len(line) // 2 :])
    return TokenLogprobs(own, tuple(zip(token_ids, values, strict=False))[:count])


def filter_columns(row_params: Sequence[SamplingParams]) -> Tensor:
    """Return top_k, top_p and min_p of rows: float32 [3, rows, 1]."""
    numbers = [[params.top_k, params.top_p, params.min_p] for params in row_params]
    return torch.tensor(numbers, dtype=torch.float32).T.unsqueeze(-1)


def filter_probabilities(probabilities: Tensor, filters: Tensor) -> Tensor:
    """Return probabilities, float32 [rows, vocab_size], with 0 for tokens that the filters remove."""
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = ordered * _top_k_min_p_mask(ordered, filters)
    return torch.zeros_like(kept).scatter_(1, token_ids, kept * _top_p_mask(kept, _row_sum(kept), filters))


def filter_candidates(
    probabilities: Tensor, filters: Tensor, candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `filter_probabilities` to the most probable tokens only.

    Args:
        probabilities: float32 [rows, vocab_size].
        filters: See `filter_columns`.
        candidates: Number of tokens to examine, below the vocabulary size.

    Returns:
        Ascending token ids [rows, candidates], their probabilities or 0, and bool [rows]: whether the
        result is exact, i.e. the filters keep no other token.
    """
    token_ids = probabilities.topk(candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    best = probabilities.gather(1, token_ids)
    ordered, at = best.sort(dim=-1, descending=True, stable=True)
    kept = ordered * _top_k_min_p_mask(ordered, filters)
    top_k, _, min_p = filters
    total = torch.where(top_k > 0, _row_sum(kept), _min_p_total(probabilities, ordered[:, :1], min_p))
    keep = _top_p_mask(kept, total, filters)
    # Tokens beyond the candidates are at most as probable as the last candidate, but may be equal to it.
    last = ordered.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
    is_exact = (last > ordered[:, -1:]) & (top_k <= candidates)
    return token_ids, torch.zeros_like(best).scatter_(1, at, kept * keep), is_exact.squeeze(1)


def _top_k_min_p_mask(ordered: Tensor, filters: Tensor) -> Tensor:
    """Return the mask of top_k and min_p for probabilities in descending order."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    is_first = (ranks < filters[0]) | (filters[0] <= 0)
    return is_first & (ordered >= filters[2] * ordered[:, :1])


def _top_p_mask(kept: Tensor, total: Tensor, filters: Tensor) -> Tensor:
    """Return the mask of top_p: the first tokens that make up the fraction top_p of the total."""
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    keep = (kept > 0) & (before < filters[1] * total)
    keep[:, 0].fill_(True)  # a top_p that rounds to 0 in float32 still keeps the most probable token
    return keep


def _min_p_total(probabilities: Tensor, largest: Tensor, min_p: Tensor) -> Tensor:
    """Return the sum of the probabilities that min_p keeps."""
    if min_p.is_cpu and not min_p.any():  # on a GPU, asking would wait
        return _row_sum(probabilities)
    return _row_sum(torch.where(probabilities >= min_p * largest, probabilities, 0.0))


def _row_sum(kept: Tensor) -> Tensor:
    # In float64: at top_p 1, rounding in float32 would remove tokens.
    total: Tensor = kept.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total
