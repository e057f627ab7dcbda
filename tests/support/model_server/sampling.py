"""Sampling by its definition, token by token in float64, and the sampler on a CPU."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from model_server.requests import GREEDY_BELOW, SamplingParams
from model_server.worker.sampler import TEMPERATURE_MAX, Sampler, SamplingRow, uniform_draws


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Sample one token per row with a sampler of its own."""
    numbered = [replace(row, arrival_index=index) for index, row in enumerate(rows)]
    sampler = Sampler(len(rows), logits.shape[1], torch.device("cpu"))
    return sampler.launch(logits.clone(), numbered).result()[0]


def kept_tokens(probabilities: Sequence[float], params: SamplingParams) -> set[int]:
    """Return the tokens that the filters keep."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    least = params.min_p * probabilities[order[0]]
    order = [token for token in order if probabilities[token] >= least and probabilities[token] > 0]
    total, before, chosen = sum(probabilities[token] for token in order), 0.0, set()
    for token in order:
        if chosen and before >= params.top_p * total:
            break
        chosen.add(token)
        before += probabilities[token]
    return chosen


def changed_logits(logits: Sequence[float], row: SamplingRow) -> list[float]:
    """Return one row's logits after penalties, biases, bans and masks."""
    params, changed = row.params, list(logits)
    for token in {*row.token_ids}:
        penalty = params.repetition_penalty
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token, count in Counter(row.token_ids[len(row.token_ids) - row.position :]).items():
        changed[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    for token in range(len(changed)):
        bits = row.allowed_bits
        is_masked = bits is not None and not (token < 8 * len(bits) and bits[token // 8] >> token % 8 & 1)
        is_left_out = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        if is_masked or is_left_out or token in row.banned:
            changed[token] = -math.inf
    return changed


def sample_by_definition(logits: Sequence[float], row: SamplingRow) -> int:
    """Return the token of one row."""
    params, changed = row.params, changed_logits(logits, row)
    if params.temperature < GREEDY_BELOW:
        return int(np.argmax(changed))
    temperature = min(params.temperature, TEMPERATURE_MAX)
    probabilities = [math.exp((logit - max(changed)) / temperature) for logit in changed]
    *attempts, last = uniform_draws([(row.seed, row.position)])[:, 0, 0].tolist()
    kept = kept_tokens(probabilities, params)
    if params.top_k <= 0 and params.min_p <= 0.0:
        for draw in attempts:
            token = invert(probabilities, draw)
            if token in kept:
                return token
    return invert([each if token in kept else 0.0 for token, each in enumerate(probabilities)], last)


def invert(probabilities: Sequence[float], draw: float) -> int:
    """Return the first token whose cumulative probability exceeds draw x total."""
    cumulated = np.cumsum(probabilities)
    return int(np.argmax(cumulated > draw * cumulated[-1]))
