"""Chooses the next token of each row from its logits.

In: logits and, per row, the sampling parameters, a seed and the token's position. Out: token ids. A row's
draw depends on its own seed and position alone, so neither batch neighbours nor preemption change it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_server.adjust import SamplingRow, adjust
from model_server.draw import draw, weigh
from model_server.requests import GREEDY_BELOW, SamplingParams
from model_server.restrict import CANDIDATES, is_restricted, left_of_all, left_of_best, left_of_many

# From here on all tokens are equally probable; at an infinite one a forbidden token's would be no number.
_HOTTEST = 1e30
_CHUNK = 128  # tokens
# Draws from all tokens for one that top_p leaves; with usual top_p the next is seldom needed.
_ATTEMPTS = 3
# Probabilities that are looked at in one go on a CPU: for many more, each of a dozen operations would get new
# memory from the system, and that takes longer than the operation.
_AT_ONCE = 1 << 20


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: float32 [rows, vocab_size]; changed in place.
        rows: One per row of logits.
    """
    adjust(logits, rows)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    tokens = best(logits) if len(random) < len(rows) else [0] * len(rows)
    at_once = _rows_at_once(logits)
    for first in range(0, len(random), at_once):
        some = random[first : first + at_once]
        drawn = _draw(_rows_of(logits, some), [rows[index] for index in some])
        for index, token in zip(some, drawn, strict=True):
            tokens[index] = token
    return tokens


def best(logits: Tensor) -> list[int]:
    """Return per row of float32 logits the token with the largest one."""
    # On a CPU numpy finds it ten times as fast as torch.
    found = logits.numpy().argmax(axis=-1) if logits.device.type == "cpu" else logits.argmax(dim=-1)
    return [int(token) for token in found.tolist()]


def uniform(seed: int, position: int) -> float:
    """Return the draw in [0, 1) of one position: a hash, so that it needs no state."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 40 bits: times a total it still rounds to less than the total, so that a draw never falls off the end.
    return (int.from_bytes(digest, "big") >> 24) / (1 << 40)


def _rows_of(logits: Tensor, some: Sequence[int]) -> Tensor:
    """Return some rows, to be changed: where these are all rows, themselves instead of a copy."""
    if len(some) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(some, device=logits.device))


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _AT_ONCE // logits.shape[-1] if logits.device.type == "cpu" else len(logits))


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token per row; the logits become probabilities, up to a factor of each row.

    In place: new memory for as many numbers takes longer than computing them.
    """
    temperatures = [min(row.params.temperature, _HOTTEST) for row in rows]
    if logits.device.type == "cpu":
        tokens = _draw_on_cpu(logits.numpy(), temperatures, rows)
    else:
        divisors = torch.tensor(temperatures, device=logits.device)[:, None]
        logits.div_(divisors).sub_(logits.amax(dim=-1, keepdim=True)).exp_()
        drawn = _invert(logits, [_draw_of(row, 0) for row in rows]).tolist()
        tokens = [-1 if is_restricted(row.params) else token for row, token in zip(rows, drawn, strict=True)]
    rest = [index for index, token in enumerate(tokens) if token < 0]
    if rest:
        at = torch.tensor(rest, device=logits.device)
        drawn = _draw_from_top(logits.index_select(0, at), [rows[index] for index in rest]).tolist()
        for index, token in zip(rest, drawn, strict=True):
            tokens[index] = token
    return tokens


def _draw_on_cpu(
    logits: NDArray[np.float32], temperatures: Sequence[float], rows: Sequence[SamplingRow]
) -> list[int]:
    """Draw where top_p alone applies or nothing; -1 for other rows, and where no attempt was left."""
    sums = weigh(logits, np.array(temperatures, np.float32))
    top_ps = np.array([row.params.top_p for row in rows])
    tokens = np.full(len(rows), -1, np.int64)
    left = [index for index, row in enumerate(rows) if _is_share(row.params)]
    for attempt in range(_ATTEMPTS):
        if not left:
            break
        draws = np.array([_draw_of(rows[index], attempt) for index in left])
        draw(logits, sums, np.array(left, np.int64), draws, top_ps, tokens)
        left = [index for index in left if tokens[index] < 0]
    return [int(token) for token in tokens.tolist()]


def _is_share(params: SamplingParams) -> bool:
    return params.top_k <= 0 and params.min_p <= 0.0


def _draw_of(row: SamplingRow, attempt: int) -> float:
    # Seeds have 64 bits: those of later attempts are nobody else's.
    return uniform(row.seed + (attempt << 64), row.position)


def _draw_from_top(probabilities: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from the tokens that are left, once these are found.

    In the order of the vocabulary, not of probability: there rounding swaps neighbours, here it only moves
    borders, so that the same draw gives the same token in whatever batch.
    """
    params = [row.params for row in rows]
    draws = [_draw_of(row, _ATTEMPTS if _is_share(row.params) else 0) for row in rows]
    if probabilities.shape[-1] < CANDIDATES:
        return _invert(left_of_all(probabilities, params), draws)
    token_ids, left, sure = left_of_best(probabilities, params)
    tokens = token_ids.gather(1, _invert(left, draws)[:, None]).squeeze(1)
    unsure = (~sure).nonzero().flatten().tolist()
    # On a CPU one by one: there sorting rows together gains nothing, and most of them need no sort.
    at_once = 1 if probabilities.device.type == "cpu" else len(rows)
    for first in range(0, len(unsure), at_once):
        some = unsure[first : first + at_once]
        at = torch.tensor(some, device=probabilities.device)
        left = _left(probabilities.index_select(0, at), [params[index] for index in some])
        tokens[at] = _invert(left, [draws[index] for index in some])
    return tokens


def _left(probabilities: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return what is left of some rows, [rows, vocab_size], however much that is."""
    quick = probabilities.device.type == "cpu" and all(params.top_k <= 0 for params in wishes)
    if not quick or not probabilities.sum().isfinite():
        return left_of_all(probabilities, wishes)
    return torch.stack([left_of_many(row, params) for row, params in zip(probabilities, wishes, strict=True)])


def _invert(probabilities: Tensor, draws: Sequence[float]) -> Tensor:
    """Return per row the first index at which the cumulated probability exceeds the draw's part of all.

    First the chunk of the vocabulary, then the token in it: cumulating all of it would take as long as a sort
    of the best tokens.
    """
    size = probabilities.shape[-1]
    whole = probabilities[:, : size - size % _CHUNK].unflatten(-1, (-1, _CHUNK))
    rest = probabilities[:, size - size % _CHUNK :]
    # Each chunk in float32, and only their sums in float64: of all values that would take five times as long.
    sums = [part.sum(dim=-1, keepdim=part is rest) for part in (whole, rest)]
    cumulated = torch.cat(sums, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(draws, dtype=torch.float64, device=probabilities.device)[:, None]
    targets = targets * cumulated[:, -1:]
    at = torch.searchsorted(cumulated, targets, right=True).clamp_(max=(size - 1) // _CHUNK)
    before = torch.where(at > 0, cumulated.gather(1, (at - 1).clamp_(min=0)), 0.0)
    ids = at * _CHUNK + torch.arange(_CHUNK, device=at.device)
    chunk = torch.where(ids < size, probabilities.gather(1, ids.clamp(max=size - 1)), 0.0)
    found = torch.searchsorted(chunk.cumsum(dim=-1, dtype=torch.float64), targets - before, right=True)
    # Where rounding lets a draw fall off the chunk's end: its last token that can be chosen.
    last = (torch.arange(_CHUNK, device=chunk.device) * (chunk > 0)).amax(dim=-1, keepdim=True)
    return (at * _CHUNK + torch.minimum(found, last)).squeeze(1)
