"""Chooses the next token of each row from its logits.

In: logits and, per row, the sampling parameters, a seed and the token's position. Out: token ids. A row's
draw depends on its own seed and position alone, so neither batch neighbours nor preemption change it.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from model_server.adjust import SamplingRow, adjust
from model_server.requests import GREEDY_BELOW, SamplingParams
from model_server.restrict import (
    CANDIDATES,
    in_share,
    is_restricted,
    left_of_all,
    left_of_best,
    left_of_many,
)

# From here on all tokens are equally probable; at an infinite one a forbidden token's would be no number.
_HOTTEST = 1e30
_CHUNK = 128  # tokens
# Draws from all tokens for one that top_p leaves; with usual top_p the next is seldom needed.
_ATTEMPTS = 3
# Probabilities that are computed in one go on a CPU: for many more, each of a dozen operations would get new
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
    for chosen, draw in (
        ([index for index in random if not is_restricted(rows[index].params)], _draw_from_all),
        ([index for index in random if is_restricted(rows[index].params)], _draw_from_left),
    ):
        for first in range(0, len(chosen), at_once):
            some = chosen[first : first + at_once]
            drawn = draw(_rows_of(logits, some), [rows[index] for index in some])
            for index, token in zip(some, drawn.tolist(), strict=True):
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


def _draw_from_all(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return _invert(_probabilities(logits, rows), rows, 0)


def _draw_from_left(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw where top_k, top_p or min_p apply."""
    probabilities = _probabilities(logits, rows)
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    shares = [row.params.top_k <= 0 and row.params.min_p <= 0.0 for row in rows]
    for draw, wanted in ((_draw_share, True), (_draw_from_top, False)):
        some = [index for index, is_share in enumerate(shares) if is_share is wanted]
        if some:
            _put(tokens, some, draw, probabilities, rows, 0)
    return tokens


def _draw_share(probabilities: Tensor, rows: Sequence[SamplingRow], attempt: int) -> Tensor:
    """Draw where top_p alone applies: from all tokens, and anew where the token is one that is left out.

    That is a draw from those that are left. To tell of one token whether it is takes a fraction of the time
    that finding all of them takes, and of the draws not much more than 1 - top_p have to be made anew.
    """
    tokens = _invert(probabilities, rows, attempt)
    kept = in_share(probabilities, tokens, [row.params for row in rows])
    out = (~kept).nonzero().flatten().tolist()
    if out:
        draw = _draw_share if attempt + 1 < _ATTEMPTS else _draw_from_top
        _put(tokens, out, draw, probabilities, rows, attempt + 1)
    return tokens


def _put(
    tokens: Tensor,
    some: Sequence[int],
    draw: Callable[[Tensor, Sequence[SamplingRow], int], Tensor],
    probabilities: Tensor,
    rows: Sequence[SamplingRow],
    attempt: int,
) -> None:
    """Draw the tokens of some of the rows."""
    if len(some) == len(rows):
        tokens.copy_(draw(probabilities, rows, attempt))
        return
    at = torch.tensor(some, device=probabilities.device)
    tokens[at] = draw(probabilities.index_select(0, at), [rows[index] for index in some], attempt)


def _draw_from_top(probabilities: Tensor, rows: Sequence[SamplingRow], attempt: int) -> Tensor:
    """Draw from the tokens that are left, once these are found.

    In the order of the vocabulary, not of probability: there rounding swaps neighbours, here it only moves
    borders, so that the same draw gives the same token in whatever batch.
    """
    if probabilities.shape[-1] < CANDIDATES:
        return _invert(left_of_all(probabilities, [row.params for row in rows]), rows, attempt)
    token_ids, left, sure = left_of_best(probabilities, [row.params for row in rows])
    tokens = token_ids.gather(1, _invert(left, rows, attempt)[:, None]).squeeze(1)
    unsure = (~sure).nonzero().flatten().tolist()
    # On a CPU one by one: there sorting rows together gains nothing, and most of them need no sort.
    at_once = 1 if probabilities.device.type == "cpu" else len(rows)
    for first in range(0, len(unsure), at_once):
        some = unsure[first : first + at_once]
        rest, at = [rows[index] for index in some], torch.tensor(some, device=probabilities.device)
        left = _left(probabilities.index_select(0, at), [row.params for row in rest])
        tokens[at] = _invert(left, rest, attempt)
    return tokens


def _left(probabilities: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return what is left of some rows, [rows, vocab_size], however much that is."""
    quick = probabilities.device.type == "cpu" and all(params.top_k <= 0 for params in wishes)
    if not quick or not probabilities.sum().isfinite():
        return left_of_all(probabilities, wishes)
    return torch.stack([left_of_many(row, params) for row, params in zip(probabilities, wishes, strict=True)])


def _probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Turn logits into probabilities, up to a factor of each row.

    In place: new memory for as many numbers takes longer than computing them.
    """
    temperatures = [[min(row.params.temperature, _HOTTEST)] for row in rows]
    logits.div_(torch.tensor(temperatures, device=logits.device)).sub_(logits.amax(dim=-1, keepdim=True))
    if logits.device.type != "cpu":
        return logits.exp_()
    # On a CPU numpy does it twice as fast as torch.
    np.exp(logits.numpy(), out=logits.numpy())
    return logits


def _invert(probabilities: Tensor, rows: Sequence[SamplingRow], attempt: int) -> Tensor:
    """Return per row the first index at which the cumulated probability exceeds the row's draw of an attempt.

    First the chunk of the vocabulary, then the token in it: cumulating all of it would take as long as a sort
    of the best tokens.
    """
    size = probabilities.shape[-1]
    whole = probabilities[:, : size - size % _CHUNK].unflatten(-1, (-1, _CHUNK))
    rest = probabilities[:, size - size % _CHUNK :]
    # Each chunk in float32, and only their sums in float64: of all values that would take five times as long.
    sums = [part.sum(dim=-1, keepdim=part is rest) for part in (whole, rest)]
    cumulated = torch.cat(sums, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    draws = torch.tensor(
        # Seeds have 64 bits: those of later attempts are nobody else's.
        [[uniform(row.seed + (attempt << 64), row.position)] for row in rows],
        dtype=torch.float64,
        device=probabilities.device,
    )
    draws = draws * cumulated[:, -1:]
    at = torch.searchsorted(cumulated, draws, right=True).clamp_(max=(size - 1) // _CHUNK)
    before = torch.where(at > 0, cumulated.gather(1, (at - 1).clamp_(min=0)), 0.0)
    ids = at * _CHUNK + torch.arange(_CHUNK, device=at.device)
    chunk = torch.where(ids < size, probabilities.gather(1, ids.clamp(max=size - 1)), 0.0)
    found = torch.searchsorted(chunk.cumsum(dim=-1, dtype=torch.float64), draws - before, right=True)
    # Where rounding lets a draw fall off the chunk's end: its last token that can be chosen.
    last = (torch.arange(_CHUNK, device=chunk.device) * (chunk > 0)).amax(dim=-1, keepdim=True)
    return (at * _CHUNK + torch.minimum(found, last)).squeeze(1)
