"""Chooses the next token of each row from its logits.

In: logits and, per row, the sampling parameters, a seed and the token's position. Out: token ids. A row's
draw depends on its own seed and position alone, so neither batch neighbours nor preemption change it.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_server.adjust import SamplingRow, adjust
from model_server.requests import SamplingParams

# Below this, dividing by the temperature overflows; it is greedy for all practical purposes.
_GREEDY_BELOW = 1e-5


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: float32 [rows, vocab_size]; changed in place.
        rows: One per row of logits.
    """
    adjust(logits, rows)
    tokens = logits.argmax(dim=-1)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= _GREEDY_BELOW]
    for chosen, draw in (
        ([index for index in random if not _is_restricted(rows[index].params)], _draw_from_all),
        ([index for index in random if _is_restricted(rows[index].params)], _draw_from_top),
    ):
        if chosen:
            at = torch.tensor(chosen, device=logits.device)
            tokens[at] = draw(logits.index_select(0, at), [rows[index] for index in chosen])
    return [int(token) for token in tokens.tolist()]


def uniform(seed: int, position: int) -> float:
    """Return the draw in [0, 1) of one position: a hash, so that it needs no state."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 40 bits: times a total it still rounds to less than the total, so that a draw never falls off the end.
    return (int.from_bytes(digest, "big") >> 24) / (1 << 40)


def _is_restricted(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _draw_from_all(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return _invert(_probabilities(logits, rows), rows)


def _draw_from_top(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw where top_k, top_p or min_p apply."""
    probabilities = _probabilities(logits, rows)
    # Drawn in the order of the vocabulary, not of probability: there rounding swaps neighbours, here it only
    # moves borders, so that the same draw gives the same token in whatever batch.
    return _invert(probabilities * _kept(probabilities, rows), rows)


def _kept(probabilities: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return which tokens top_k, top_p and min_p leave, bool [rows, vocab_size].

    All three keep the most probable ones; top_p is a share of what the other two left.
    """
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    vocab_size = ordered.shape[-1]

    def column(value: Callable[[SamplingParams], float]) -> Tensor:
        return torch.tensor([[value(row.params)] for row in rows], device=ordered.device)

    ranks = torch.arange(vocab_size, device=ordered.device)
    keep = ranks < column(lambda params: params.top_k if params.top_k > 0 else vocab_size)
    keep &= ordered >= column(lambda params: params.min_p) * ordered[:, :1]
    left = ordered * keep
    before = left.cumsum(dim=-1, dtype=torch.float64) - left
    keep &= before < column(lambda params: params.top_p) * left.sum(dim=-1, keepdim=True)
    keep[:, 0] = True  # a top_p that float32 rounds to 0 still means the most probable token
    return torch.empty_like(keep).scatter_(1, token_ids, keep)


def _probabilities(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    temperatures = torch.tensor([[row.params.temperature] for row in rows], device=logits.device)
    return (logits / temperatures).softmax(dim=-1)


def _invert(probabilities: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return per row the first index at which the cumulated probability exceeds the row's draw."""
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    draws = torch.tensor(
        [[uniform(row.seed, row.position)] for row in rows], dtype=torch.float64, device=probabilities.device
    )
    found = torch.searchsorted(cumulated, draws * cumulated[:, -1:], right=True).squeeze(1)
    return found.clamp_(max=probabilities.shape[-1] - 1)
