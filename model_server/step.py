"""A step as plain numbers, the same for every rank, and the choice of tokens from what the model makes of it.

In: the scheduler's chunks, and logits. Out: arguments of `ModelRunner.execute`, and tokens.
"""

from array import array
from collections.abc import Sequence

from torch import Tensor

from model_server.adjust import SamplingRow
from model_server.live_request import LiveRequest
from model_server.logprobs import log_probabilities, read_logprobs
from model_server.model_runner import SpanNumbers
from model_server.requests import ChosenToken
from model_server.sampler import best, sample
from model_server.scheduler import Chunk


def step_numbers(
    chunks: Sequence[Chunk],
) -> tuple["array[int]", "array[int]", list[SpanNumbers], list[int]]:
    """Put chunks, at most one per request, into one batch: the first arguments of `ModelRunner.execute`."""
    token_ids, rows = array("i"), array("i")
    for chunk in chunks:
        token_ids.extend(chunk.live.token_ids[chunk.start : chunk.stop])
        if chunk.samples:
            rows.append(len(token_ids) - 1)
    spans = [(chunk.start, chunk.length, chunk.live.block_ids) for chunk in chunks]
    lora_ids = [0 if chunk.live.adapter is None else chunk.live.adapter.lora_id for chunk in chunks]
    return token_ids, rows, spans, lora_ids if any(lora_ids) else []


def choose_tokens(
    logits: Tensor, requests: Sequence[LiveRequest], eos_token_ids: frozenset[int]
) -> list[ChosenToken]:
    """Choose each request's next token.

    Args:
        logits: float32 [requests, vocab_size]; changed in place.
        requests: One per row of logits.
        eos_token_ids: Tokens that end a text.
    """
    if all(live.takes_best for live in requests):
        return list(map(ChosenToken, best(logits)))
    counts = [live.request.sampling.logprobs for live in requests]
    logprobs = log_probabilities(logits, counts)
    tokens = sample(logits, [_sampling_row(live, eos_token_ids) for live in requests])
    for live, token in zip(requests, tokens, strict=True):
        if live.request.constraint is not None:
            live.request.constraint.accept(token)
    told = read_logprobs(logprobs, counts, tokens)
    return [ChosenToken(token, entry) for token, entry in zip(tokens, told, strict=True)]


def _sampling_row(live: LiveRequest, eos_token_ids: frozenset[int]) -> SamplingRow:
    params, constraint = live.request.sampling, live.request.constraint
    is_early = live.num_generated < params.min_tokens
    return SamplingRow(
        params,
        live.sampling_seed,
        live.num_generated,
        params.stop_token_ids | eos_token_ids if is_early else frozenset(),
        live.token_ids,
        None if constraint is None else constraint.allowed_bits(),
    )
