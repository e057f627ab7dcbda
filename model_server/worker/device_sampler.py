"""Sampling on a GPU: the tokens of `sampler.sample`, without a wait between the logits and the token ids.

A step's numbers go up in one copy; parameters and token counts of requests stay on the device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_server.requests import GREEDY_BELOW, TokenLogprobs
from model_server.worker import sampler
from model_server.worker.sampler import SamplingRow

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_COLUMNS = ("top_k", "top_p", "min_p", "temperature", *_PENALTIES)
_columns_of = attrgetter(*_COLUMNS)
# A count is 2 per occurrence in the output, and 1 more for a token of the prompt.
_IN_PROMPT, _IN_OUTPUT = 1, 2
_SORTED_ROWS = 16  # rows whose whole vocabulary is sorted at once, which takes 48 bytes per logit


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Tokens of one step, on their way to the host."""

    _counts: Sequence[int | None]
    _parts: list[Tensor]  # tokens, -1 where only `_draw_again` can tell, and a table of log probabilities
    _arrived: torch.cuda.Event | None
    _draw_again: Callable[[Tensor], list[Tensor]]  # takes indices of rows

    @torch.inference_mode()
    def result(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for token ids and log probabilities, one per row; the logits must still be there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        parts = self._parts
        undecided = (parts[0] < 0).nonzero().flatten()
        if len(undecided):
            parts = self._draw_again(undecided)
        return parts[0].tolist(), sampler.as_token_logprobs(parts[1:], self._counts)


class DeviceSampler:
    """Samples batches on one device."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate the state of `max_rows` requests; token counts only with the first that has penalties.

        Args:
            max_rows: Rows of the largest batch.
            vocab_size: Columns of the logits.
            device: Device of the logits.
        """
        self._max_rows, self._vocab_size, self._device = max_rows, vocab_size, device
        self._rows: dict[int, int] = {}  # rows of the state by arrival index, least recently sampled first
        self._num_counted = [0] * max_rows  # leading tokens in the counts
        self._params = torch.zeros((len(_COLUMNS), max_rows), dtype=torch.float64, device=device)
        self._token_counts: Tensor | None = None  # int32 [max_rows, vocab_size]

    @torch.inference_mode()
    def launch(
        self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int | None]
    ) -> DeviceSample:
        """Queue the sampling of one token per row, without waiting for the device.

        Args:
            logits: float32 [rows, vocab_size], modified in place.
            rows: State of each row, at most `max_rows`; their `arrival_index` identifies requests.
            counts: Number of top log probabilities requested per row; None for no log probabilities.
        """
        asked = [index for index, count in enumerate(counts) if count is not None]
        random = [row.params for row in rows if row.params.temperature >= GREEDY_BELOW]
        attempts = [sampler.num_attempts(params) for params in random]
        if not asked and all(
            row.params.is_greedy and row.allowed_bits is None and not row.banned for row in rows
        ):
            tokens = logits.argmax(dim=-1)
        else:
            draws, params, asked_at, *changes = self._upload_step(rows, asked, max(attempts, default=0))
            logprobs = logits[asked_at].log_softmax(dim=-1)
            logits = self._process_logits(logits, params[4:].float(), changes)
            tokens = logits.argmax(dim=-1)
            if random:
                tokens = _draw(logits, tokens, params, draws, any(number != 1 for number in attempts))

        def results() -> list[Tensor]:
            if not asked:
                return [tokens]
            return [tokens, sampler.tabulate_logprobs(logprobs, tokens[asked_at].clamp(min=0), counts)]

        def draw_again(undecided: Tensor) -> list[Tensor]:
            for at in undecided.to(self._device).split(_SORTED_ROWS):
                tokens[at] = sampler.draw_from_all(logits[at], params[:3, at].float(), draws[-1, at])
            return results()

        is_cuda = self._device.type == "cuda"
        copies = [
            torch.empty(part.shape, dtype=part.dtype, pin_memory=is_cuda).copy_(part, non_blocking=True)
            for part in results()
        ]
        arrived = torch.cuda.Event() if is_cuda else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(self._device))
        return DeviceSample(counts, copies, arrived, draw_again)

    def _upload_step(self, rows: Sequence[SamplingRow], asked: list[int], num_attempts: int) -> list[Tensor]:
        """Queue the upload of a step's numbers; keep those that stay, and return the others."""
        at, new = self._assign(rows)
        columns = [_columns_of(rows[index].params) for index in new]
        draws, device_at, new_at, new_params, asked_at, *changes = self._upload(
            _draws_of(rows, num_attempts),
            np.array(at),
            np.array([at[index] for index in new], np.int64),
            np.array(columns, np.float64).reshape(-1, len(_COLUMNS)).T,
            np.array(asked, np.int64),
            *self._new_counts(rows, at),
            _biases_of(rows),
            *self._bitmasks_of(rows),
        )
        self._params.index_copy_(1, new_at, new_params)
        return [draws, self._params[:, device_at].unsqueeze(-1), asked_at, device_at, *changes]

    def _assign(self, rows: Sequence[SamplingRow]) -> tuple[list[int], list[int]]:
        """Return each row's row of the state, and the indices of those that are new."""
        assert len(rows) <= self._max_rows, "a batch has more rows than the sampler was made for"
        keys = [row.arrival_index for row in rows]
        self._rows |= {key: self._rows.pop(key) for key in keys if key in self._rows}
        new = [index for index, key in enumerate(keys) if key not in self._rows]
        for index in new:
            is_full = len(self._rows) == self._max_rows
            at = self._rows.pop(next(iter(self._rows))) if is_full else len(self._rows)
            self._rows[keys[index]], self._num_counted[at] = at, 0
        return [self._rows[key] for key in keys], new

    def _new_counts(self, rows: Sequence[SamplingRow], at: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
        """Return the counts to clear, and (row, token id, addend) of tokens that are not counted yet."""
        cleared, added = list[int](), list[tuple[int, int, int]]()
        for row, state in zip(rows, at, strict=True):
            if not row.params.has_penalties:
                continue
            num_counted, num_prompt = self._num_counted[state], len(row.token_ids) - row.position
            if not 0 < num_counted < len(row.token_ids):
                num_counted = 0
                cleared.append(state)
                added += [(state, token, _IN_PROMPT) for token in {*row.token_ids[:num_prompt]}]
            output = row.token_ids[max(num_prompt, num_counted) :]
            added += [(state, token, _IN_OUTPUT) for token in output]
            self._num_counted[state] = len(row.token_ids)
        return np.array(cleared, np.int64), np.array(added, np.int64).reshape(-1, 3).T

    def _bitmasks_of(self, rows: Sequence[SamplingRow]) -> tuple[NDArray[Any], ...]:
        """Return the rows with masks of allowed tokens, and the masks, uint8 [those rows, bytes]."""
        width = -(-self._vocab_size // 8)
        masks = [
            (index, bits[:width].ljust(width, b"\0"))
            for index, row in enumerate(rows)
            for bits in (row.allowed_bits, _pack(row.params.allowed_token_ids))
            if bits is not None
        ]
        packed = np.frombuffer(b"".join(bits for _, bits in masks), np.uint8)
        return np.array([index for index, _ in masks], np.int64), packed.reshape(-1, width)

    def _process_logits(self, logits: Tensor, penalties: Tensor, changes: Sequence[Tensor]) -> Tensor:
        """Apply penalties, biases, bans and bit masks; see `apply_logit_processors`."""
        at, cleared, added, biases, masked, masks = changes
        if added.shape[1]:
            if self._token_counts is None:
                shape = (self._max_rows, self._vocab_size)
                self._token_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._token_counts.index_fill_(0, cleared, 0)
            self._token_counts.index_put_((added[0], added[1]), added[2].int(), accumulate=True)
            # Without penalties a row's counts are another request's, but change nothing.
            logits = _penalise(logits, self._token_counts[at], *penalties)
        if biases.shape[1]:
            logits.index_put_((biases[0].long(), biases[1].long()), biases[2].float(), accumulate=True)
        if len(masked):
            bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=self._device) & 1
            is_allowed = bits.flatten(1)[:, : self._vocab_size] > 0
            logits.index_add_(0, masked, torch.where(is_allowed, 0.0, -math.inf))
        return logits

    def _upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Queue one copy of arrays to the device."""
        starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)]).tolist()
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        host_bytes = host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            host_bytes[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        copy = torch.empty(len(host), dtype=torch.uint8, device=self._device).copy_(host, non_blocking=True)
        kinds = {"f": torch.float64, "i": torch.int64, "u": torch.uint8}
        return [
            copy[start : start + array.nbytes].view(kinds[array.dtype.kind]).view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]


def _draws_of(rows: Sequence[SamplingRow], num_attempts: int) -> NDArray[np.float64]:
    """Return the uniform draws, float64 [attempts + 1, rows, 1]; last those from the filtered tokens."""
    draws = np.zeros((num_attempts + 1, len(rows), 1))
    for index, row in enumerate(rows):
        if row.params.temperature >= GREEDY_BELOW:
            own = sampler.num_attempts(row.params)
            draws[:own, index, 0] = [sampler.draw_value(row, attempt) for attempt in range(own)]
            if own != 1:
                draws[-1, index, 0] = sampler.draw_value(row, own)
    return draws


def _draw(logits: Tensor, greedy: Tensor, params: Tensor, draws: Tensor, is_filtered: bool) -> Tensor:
    """Return the token of each row, replacing the logits by unnormalised probabilities; -1 if undecided."""
    top_k, top_p, min_p, temperature = params[:4]
    divisors = temperature.clamp(GREEDY_BELOW, sampler.TEMPERATURE_MAX).float()
    probabilities = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(divisors).exp_()
    if is_filtered:
        tokens = sampler.draw_from_candidates(probabilities, params[:3].float(), draws[-1])
        total = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64)
        for attempt in reversed(range(len(draws) - 1)):
            drawn = sampler.sample_by_inverse_cdf(probabilities, draws[attempt])
            is_kept = (top_p >= 1.0) | (_more_probable_sum(probabilities, drawn) < top_p * total)
            tokens = torch.where((is_kept & (top_k <= 0) & (min_p <= 0)).squeeze(1), drawn, tokens)
    else:
        tokens = sampler.sample_by_inverse_cdf(probabilities, draws[0])
    return torch.where(temperature.squeeze(1) < GREEDY_BELOW, greedy, tokens)


def _more_probable_sum(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return the probability sum, float64 [rows, 1], of tokens more probable, or equal with a lower id."""
    own = probabilities.gather(1, tokens[:, None])
    ids = torch.arange(probabilities.shape[1], device=tokens.device)
    is_before = (probabilities > own) | ((probabilities == own) & (ids < tokens[:, None]))
    return torch.where(is_before, probabilities, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)


def _penalise(
    logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits, generated = torch.where(counts > 0, repeated, logits), counts // _IN_OUTPUT
    return torch.where(generated > 0, logits - (frequency * generated + presence), logits)


def _biases_of(rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
    """Return biases and bans as (row, token id, addend), float64 [3, entries]."""
    entries = [(index, *bias) for index, row in enumerate(rows) for bias in row.params.logit_bias.items()]
    entries += [(index, token_id, -math.inf) for index, row in enumerate(rows) for token_id in row.banned]
    return np.array(entries, np.float64).reshape(-1, 3).T


@lru_cache(maxsize=256)
def _pack(token_ids: frozenset[int] | None) -> bytes | None:
    """Return the bit mask of token ids; see `TokenConstraint.compute_bitmask`."""
    if token_ids is None:
        return None
    return np.packbits(np.isin(np.arange(max(token_ids) + 1), [*token_ids]), bitorder="little").tobytes()
