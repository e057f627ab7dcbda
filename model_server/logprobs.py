"""Log probabilities of chosen tokens, for the requests that ask for them.

In: logits as the model gave them, and the tokens chosen. Out: per token its own and the best ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.requests import TokenLogprobs


def log_probabilities(logits: Tensor, counts: Sequence[int | None]) -> Tensor:
    """Return the log probabilities of those rows that want them; it must be read before the logits change.

    Args:
        logits: float32 [rows, vocab_size].
        counts: Per row how many of the best to tell; None for none at all.

    Returns:
        float32 [wanting rows, vocab_size].
    """
    wanting = [index for index, count in enumerate(counts) if count is not None]
    return logits[torch.tensor(wanting, dtype=torch.int64, device=logits.device)].log_softmax(dim=-1)


def read_logprobs(
    logprobs: Tensor, counts: Sequence[int | None], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Return what `log_probabilities` tells about the chosen tokens.

    Args:
        logprobs: Its result.
        counts: Per row as above.
        token_ids: Per row the token that was chosen.
    """
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
