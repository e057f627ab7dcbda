"""What a request's wishes make of its logits before a token is chosen.

In: logits and, per row, the sampling parameters and the tokens so far. Out: the same logits, changed.
Penalties first, then biases, then what may not be chosen at all. Knows nothing of randomness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_server.requests import SamplingParams

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to sample one row."""

    params: SamplingParams  # the request's wishes
    seed: int  # base of its random draws
    position: int  # tokens generated before this one
    banned: frozenset[int] = frozenset()  # tokens that must not be chosen now
    token_ids: Sequence[int] = ()  # prompt and generated tokens; the last `position` ones are the generated
    allowed_bits: bytes | None = None  # one bit a token, as `TokenConstraint` tells them; None allows all


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply penalties, biases and bans.

    Args:
        logits: float32 [rows, vocab_size]; changed in place.
        rows: One per row of logits.
    """
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
