"""Which tokens top_k, top_p and min_p leave.

In: probabilities, up to a factor of each row, and, per row, the wishes. Out: the probabilities of what is
left. All three keep the most probable tokens; top_p is a share of what the other two left. Of equally
probable tokens those with lower ids come first.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_server.requests import SamplingParams

# Nearly always enough: sorting a whole vocabulary takes ten times as long as finding so many best tokens.
CANDIDATES = 256
# Probabilities whose bits are the same but for the last so many are told apart only where top_p's border is:
# 128 kinds from each power of two to the next.
_KIND_SHIFT = 16


def is_restricted(params: SamplingParams) -> bool:
    """Tell whether any token is left out."""
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def left_of_all(probabilities: Tensor, wishes: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities, 0 where a token is left out.

    Args:
        probabilities: float32 [rows, vocab_size].
        wishes: One per row.
    """
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    left = ordered * _ranked(ordered, wishes)
    return torch.zeros_like(left).scatter_(1, token_ids, left * _share(left, _sum(left), wishes))


def left_of_best(
    probabilities: Tensor, wishes: Sequence[SamplingParams], candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same among the most probable tokens alone.

    Args:
        probabilities: float32 [rows, vocab_size].
        wishes: One per row.
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


def left_of_many(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Do the same for one row of which many tokens are left: only those around top_p's border are sorted.

    Args:
        probabilities: float32 [vocab_size], on a CPU.
        params: Without top_k.
    """
    assert params.top_k <= 0
    left = torch.where(probabilities >= params.min_p * probabilities.amax(), probabilities, 0.0)
    kinds = left.view(torch.int32) >> _KIND_SHIFT  # floats from 0 on are in the order of their bits
    masses = torch.bincount(kinds, weights=left.double()).flip(0)  # the most probable kind first
    cumulated = masses.cumsum(dim=0)
    before = cumulated - masses
    border = int((before < params.top_p * cumulated[-1]).nonzero()[-1])
    kind = len(masses) - 1 - border
    at = (kinds == kind).nonzero().flatten()
    ordered, order = left[at].sort(descending=True, stable=True)
    before_each = before[border] + ordered.cumsum(dim=0, dtype=torch.float64) - ordered
    kept = at[order[before_each < params.top_p * cumulated[-1]]]
    return torch.where(kinds > kind, left, 0.0).index_copy_(0, kept, left[kept])


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
