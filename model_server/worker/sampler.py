"""Chooses the next token of each row from its logits, and tells how probable it was.

First penalties, then biases, then what may not be chosen at all; then top_k, top_p and min_p, which keep the
most probable tokens, top_p as a share of what the other two left (of equally probable tokens those with lower
ids come first). A row's draw depends on its own seed and position alone, so neither batch neighbours nor
preemption change it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_server.requests import GREEDY_BELOW, SamplingParams, TokenLogprobs
from model_server.worker.draw import draw, weigh

_NEVER = float("-inf")
# From here on all tokens are equally probable; at an infinite one a forbidden token's would be no number.
_HOTTEST = 1e30
_CHUNK = 128  # tokens
# Draws from all tokens for one that top_p leaves; with usual top_p the next is seldom needed.
_ATTEMPTS = 3
# Probabilities that are looked at in one go on a CPU: for many more, each of a dozen operations would get new
# memory from the system, and that takes longer than the operation.
LOGITS_AT_ONCE = 1 << 20
# Nearly always enough: sorting a whole vocabulary takes ten times as long as finding so many best tokens.
CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to sample one row."""

    params: SamplingParams  # the request's wishes
    seed: int  # base of its random draws
    position: int  # tokens generated before this one
    banned: frozenset[int] = frozenset()  # tokens that must not be chosen now
    token_ids: Sequence[int] = ()  # prompt and generated tokens; the last `position` ones are the generated
    allowed_bits: bytes | None = None  # one bit a token, as `TokenConstraint` tells them; None allows all


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Choose one token per row of float32 logits [rows, vocab_size], which are changed in place."""
    adjust(logits, rows)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    tokens = best(logits) if len(random) < len(rows) else [0] * len(rows)
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1] if logits.device.type == "cpu" else len(logits))
    for first in range(0, len(random), at_once):
        some = random[first : first + at_once]
        # To be changed: where these are all rows, themselves instead of a copy.
        chosen = logits if len(some) == len(logits) else logits[some]
        drawn = _draw(chosen, [rows[index] for index in some])
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
        tokens = [
            token if _is_share(row.params) and row.params.top_p >= 1.0 else -1
            for row, token in zip(rows, drawn, strict=True)
        ]
    rest = [index for index, token in enumerate(tokens) if token < 0]
    if rest:
        drawn = _draw_from_top(logits[rest], [rows[index] for index in rest]).tolist()
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
    # On a CPU one by one: there sorting rows together gains nothing.
    at_once = 1 if probabilities.device.type == "cpu" else len(rows)
    for first in range(0, len(unsure), at_once):
        some = unsure[first : first + at_once]
        left = left_of_all(probabilities[some], [params[index] for index in some])
        tokens[some] = _invert(left, [draws[index] for index in some])
    return tokens


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


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply penalties, biases and bans to float32 logits [rows, vocab_size] in place."""
    for index, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            _penalize(logits[index], row)
        if params.logit_bias:
            at = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[index, at] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.allowed_token_ids is not None:
            _keep_only(logits[index], torch.tensor(sorted(params.allowed_token_ids), device=logits.device))
        if row.allowed_bits is not None:
            _keep_only(logits[index], _set_bits(row.allowed_bits, logits.shape[1]).to(logits.device))
        if row.banned:
            logits[index, sorted(row.banned)] = _NEVER


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(row.token_ids, device=logits.device).unique()
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.position and (params.frequency_penalty or params.presence_penalty):
        generated = torch.tensor(row.token_ids[-row.position :], device=logits.device)
        said, counts = generated.unique(return_counts=True)
        logits[said] -= params.frequency_penalty * counts + params.presence_penalty


def _keep_only(logits: Tensor, token_ids: Tensor) -> None:
    kept = logits[token_ids]
    logits.fill_(_NEVER)
    logits[token_ids] = kept


def _set_bits(bits: bytes, vocab_size: int) -> Tensor:
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    return torch.from_numpy(np.flatnonzero(flags[:vocab_size]))


def log_probabilities(logits: Tensor, counts: Sequence[int | None]) -> Tensor:
    """Return the log probabilities of those rows that want them; it must be read before the logits change.

    Args:
        logits: float32 [rows, vocab_size].
        counts: Per row how many of the best to tell; None for none at all.

    Returns:
        float32 [wanting rows, vocab_size].
    """
    return logits[[count is not None for count in counts]].log_softmax(dim=-1)


def read_logprobs(
    logprobs: Tensor, counts: Sequence[int | None], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Return what `log_probabilities` tells about the chosen tokens, one a row."""
    pairs = zip(counts, token_ids, strict=True)
    asked = [(count, token_id) for count, token_id in pairs if count is not None]
    if not asked:
        return [None] * len(counts)
    chosen = logprobs.gather(1, torch.tensor([[token_id] for _, token_id in asked], device=logprobs.device))
    top = logprobs.topk(max(count for count, _ in asked), dim=-1)
    told = iter(
        TokenLogprobs(own, tuple(zip(best_ids[:count], best[:count], strict=True)))
        for (count, _), (own,), best_ids, best in zip(
            asked, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    )
    return [None if count is None else next(told) for count in counts]


def left_of_all(probabilities: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return float32 probabilities [rows, vocab_size], 0 where a token is left out."""
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    left = ordered * _ranked(ordered, wishes)
    return torch.zeros_like(left).scatter_(1, token_ids, left * _share(left, _sum(left), wishes))


def left_of_best(
    probabilities: Tensor, wishes: Sequence[SamplingParams], candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same among the most probable tokens alone.

    Args:
        probabilities: float32 [rows, vocab_size].
        candidates: How many tokens to look at; fewer than the vocabulary has.

    Returns:
        Rising token ids [rows, candidates], their probabilities or 0, and bool [rows]: whether these are all
        that is left.
    """
    token_ids = probabilities.topk(candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    best = probabilities.gather(1, token_ids)
    ordered, at = best.sort(dim=-1, descending=True, stable=True)
    left = ordered * _ranked(ordered, wishes)
    most = _column(wishes, ordered, lambda params: params.top_k)
    total = torch.where(most > 0, _sum(left), _sum_of_all(probabilities, ordered[:, :1], wishes))
    keep = _share(left, total, wishes)
    # Beyond the candidates nothing is more probable than the last of them, but something may be equal to it.
    last = ordered.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
    sure = (last > ordered[:, -1:]) & (most <= candidates)
    return token_ids, torch.zeros_like(best).scatter_(1, at, left * keep), sure.squeeze(1)


def _ranked(ordered: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return what top_k and min_p leave of tokens in the order of probability."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    most = _column(wishes, ordered, lambda params: params.top_k if params.top_k > 0 else float("inf"))
    least = _column(wishes, ordered, lambda params: params.min_p) * ordered[:, :1]
    return (ranks < most) & (ordered >= least)


def _share(left: Tensor, total: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return which of the tokens that are left make up top_p of the total."""
    before = left.cumsum(dim=-1, dtype=torch.float64) - left
    keep = (left > 0) & (before < _column(wishes, left, lambda params: params.top_p) * total)
    keep[:, 0] = True  # a top_p that float32 rounds to 0 still means the most probable token
    return keep


def _sum_of_all(probabilities: Tensor, largest: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return the sum over the vocabulary of what min_p leaves."""
    if not any(params.min_p > 0.0 for params in wishes):
        return _sum(probabilities)
    least = _column(wishes, largest, lambda params: params.min_p) * largest
    return _sum(torch.where(probabilities >= least, probabilities, 0.0))


def _sum(left: Tensor) -> Tensor:
    # In float64: at a top_p of 1 the sum's rounding would leave out tokens.
    return left.sum(dim=-1, keepdim=True, dtype=torch.float64)


def _column(
    wishes: Sequence[SamplingParams], like: Tensor, value: Callable[[SamplingParams], float]
) -> Tensor:
    return torch.tensor([[float(value(params))] for params in wishes], device=like.device)
