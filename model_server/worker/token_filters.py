"""Draws of tokens from probabilities that top_k, min_p and top_p restrict, on any device.

First top_k and min_p apply, then top_p as a fraction of what these two keep. Ties go to lower token ids. In
all functions probabilities are float32 [rows, vocab_size] and need not sum to 1; filters are float64
[3, rows, 1]: top_k, top_p and min_p; draws are float64 [rows, 1], at least 0 and below 1. A draw inverts the
cumulative probability in the order of token ids. In the order of probability, rounding could swap neighbours,
so that the same draw would give another token in another batch.
"""

import torch
from torch import Tensor

# Top tokens to filter; nearly always enough. Sorting the whole vocabulary takes ten times as long.
CANDIDATES = 256
_CHUNK = 128  # tokens


def draw_by_rejection(probabilities: Tensor, filters: Tensor, draws: Tensor) -> Tensor:
    """Draw a token of each row from all, int64 [rows]; -1 where top_p removes it, or with another filter.

    Checking one token takes a fraction of the time of finding all that top_p keeps.
    """
    top_k, top_p, min_p = filters
    tokens = sample_by_inverse_cdf(probabilities, draws)[:, None]
    own = probabilities.gather(1, tokens)
    # Tokens of equal probability come in the order of their ids. Comparisons that give numbers are several
    # times as fast as `torch.where` on a CPU.
    ids = torch.arange(probabilities.shape[1], device=tokens.device, dtype=torch.float32)
    flags = torch.lt(ids, tokens.float(), out=torch.empty_like(probabilities))
    borders = torch.sub(own, flags.mul_(own - own.nextafter(own.new_zeros(()))), out=flags)
    before = _row_sum(_chunk_sums(torch.gt(probabilities, borders, out=flags).mul_(probabilities)))
    # Rounding of the sum must not reject a token where there is no top_p.
    is_kept = (top_p >= 1.0) | (before < top_p * _row_sum(_chunk_sums(probabilities)))
    return torch.where(is_kept & (top_k <= 0) & (min_p <= 0), tokens, -1).squeeze(1)


def draw_from_candidates(probabilities: Tensor, filters: Tensor, draws: Tensor) -> Tensor:
    """Draw a token of each row from those that the filters keep, int64 [rows].

    Looks at the most probable tokens only; returns -1 where these do not decide it.
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
    cumulative = _chunk_sums(probabilities).cumsum(dim=-1, dtype=torch.float64)
    targets = draws * cumulative[:, -1:]
    at = torch.searchsorted(cumulative, targets, right=True).clamp_(max=(size - 1) // _CHUNK)
    before = torch.where(at > 0, cumulative.gather(1, (at - 1).clamp_(min=0)), 0.0)
    ids = at * _CHUNK + torch.arange(_CHUNK, device=at.device)
    chunk = torch.where(ids < size, probabilities.gather(1, ids.clamp(max=size - 1)), 0.0)
    found = torch.searchsorted(chunk.cumsum(dim=-1, dtype=torch.float64), targets - before, right=True)
    # If rounding puts a draw beyond the chunk's end, use its last token with a probability above 0.
    last = (torch.arange(_CHUNK, device=chunk.device) * (chunk > 0)).amax(dim=-1, keepdim=True)
    return (at * _CHUNK + torch.minimum(found, last)).squeeze(1)


def filter_probabilities(probabilities: Tensor, filters: Tensor) -> Tensor:
    """Return the probabilities with 0 for tokens that the filters remove."""
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    kept = ordered * _top_k_min_p_mask(ordered, filters)
    return torch.zeros_like(kept).scatter_(1, token_ids, kept * _top_p_mask(kept, _row_sum(kept), filters))


def filter_candidates(
    probabilities: Tensor, filters: Tensor, candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `filter_probabilities` to the most probable tokens only, fewer than the vocabulary has.

    Returns:
        Ascending token ids [rows, candidates], their probabilities or 0, and bool [rows]: whether the
        result is exact, i.e. the filters keep no other token.
    """
    token_ids = probabilities.topk(candidates, dim=-1, sorted=False).indices.sort(dim=-1).values
    best = probabilities.gather(1, token_ids)
    ordered, at = best.sort(dim=-1, descending=True, stable=True)
    kept = ordered * _top_k_min_p_mask(ordered, filters)
    left = torch.ge(probabilities, _least(filters, ordered), out=torch.empty_like(probabilities))
    keep = _top_p_mask(
        kept, torch.where(filters[0] > 0, _row_sum(kept), _row_sum(left.mul_(probabilities))), filters
    )
    # Tokens beyond the candidates are at most as probable as the last candidate, but may be equal to it.
    last = ordered.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
    is_exact = (last > ordered[:, -1:]) & (filters[0] <= candidates)
    return token_ids, torch.zeros_like(best).scatter_(1, at, kept * keep), is_exact.squeeze(1)


def _top_k_min_p_mask(ordered: Tensor, filters: Tensor) -> Tensor:
    """Return the mask of top_k and min_p for probabilities in descending order."""
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    is_first = (ranks < filters[0]) | (filters[0] <= 0)
    return is_first & (ordered >= _least(filters, ordered))


def _least(filters: Tensor, ordered: Tensor) -> Tensor:
    """Return the smallest probability that min_p keeps: float32 [rows, 1]."""
    return (filters[2] * ordered[:, :1]).float()


def _top_p_mask(kept: Tensor, total: Tensor, filters: Tensor) -> Tensor:
    """Return the mask of top_p: the first tokens that make up the fraction top_p of the total."""
    before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    keep = (kept > 0) & (before < filters[1] * total)
    keep[:, 0].fill_(True)  # a top_p that rounds to 0 in float32 still keeps the most probable token
    return keep


def _chunk_sums(probabilities: Tensor) -> Tensor:
    # Each chunk in float32, and only the sums of chunks in float64: that for all takes five times as long.
    size = probabilities.shape[-1]
    whole = probabilities[:, : size - size % _CHUNK].unflatten(-1, (-1, _CHUNK))
    rest = probabilities[:, size - size % _CHUNK :]
    return torch.cat([whole.sum(dim=-1), rest.sum(dim=-1, keepdim=True)], dim=-1)


def _row_sum(kept: Tensor) -> Tensor:
    # In float64: at top_p 1, rounding in float32 would remove tokens.
    total: Tensor = kept.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total
