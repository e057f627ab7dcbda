"""Sampling of the next token of each row, without a wait between the logits and the token ids.

Order: penalties, logit biases, bans, then the filters. A step's numbers go up in one copy; parameters and
token counts of requests stay on the device. A row's draw depends only on its seed and position, not on
preemption or on the rest of the batch.
"""

import hashlib
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

from model_server.requests import GREEDY_BELOW, SamplingParams, TokenLogprobs
from model_server.worker.token_filters import (
    draw_by_rejection,
    draw_from_all,
    draw_from_candidates,
    sample_by_inverse_cdf,
)

# Higher temperatures are uniform anyway; an infinite one would make a banned token's probability NaN.
TEMPERATURE_MAX = 1e30
# Attempts at rejection sampling for top_p; with usual values a second one is rarely needed.
ATTEMPTS = 3
# Probabilities per pass on a CPU. With many more, each of a dozen operations would allocate memory from the
# operating system, which takes longer than the operation.
CPU_BATCH_LOGITS = 1 << 22
_SORTED_ROWS = 16  # rows whose whole vocabulary is sorted at once, which takes 48 bytes per logit
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_COLUMNS = ("top_k", "top_p", "min_p", "temperature", *_PENALTIES)
_columns_of = attrgetter(*_COLUMNS)
# A count is 2 per occurrence in the output, and 1 more for a token of the prompt.
_IN_PROMPT, _IN_OUTPUT = 1, 2
_NO_TOKENS = np.zeros((2, 0), np.int64)

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]  # see `token_filters`


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Sampling state of one row."""

    params: SamplingParams
    seed: int  # seed of its random draws
    position: int  # tokens generated before this one
    banned: frozenset[int] = frozenset()  # tokens that must not be sampled now
    token_ids: Sequence[int] = ()  # prompt and output tokens; the last `position` are output
    allowed_bits: bytes | None = None  # see `TokenConstraint.compute_bitmask`; None allows all
    arrival_index: int = 0  # identifies its request


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one step, on their way to the host."""

    _counts: Sequence[int | None]  # of top log probabilities, by row; None: not asked for
    _parts: list[Tensor]  # tokens, -1 where only `_draw_again` can tell, and a table of log probabilities
    _arrived: torch.cuda.Event | None
    _draw_again: Callable[[Tensor], list[Tensor]]  # takes indices of rows

    @torch.inference_mode()
    def result(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for token ids and log probabilities, one per row; the logits must still be there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, *tables = self._parts
        undecided = (tokens < 0).nonzero().flatten()
        if len(undecided):
            tokens, *tables = self._draw_again(undecided)
        lines = (line for table in tables for line in table.tolist())
        logprobs = [None if count is None else _read_line(next(lines), count) for count in self._counts]
        return tokens.tolist(), logprobs


class Sampler:
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
        self._rows_at_once = max(1, CPU_BATCH_LOGITS // vocab_size) if device.type == "cpu" else max_rows

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sample:
        """Queue the sampling of one token per row, without waiting for the device.

        Args:
            logits: float32 [rows, vocab_size], modified in place.
            rows: State of each row, at most `max_rows`; their `arrival_index` identifies requests. Empty if
                the largest logit of each row is its token.
        """
        counts = [row.params.logprobs for row in rows] or [None] * len(logits)
        asked = [index for index, count in enumerate(counts) if count is not None]
        random = [row.params for row in rows if row.params.temperature >= GREEDY_BELOW]
        if not rows:
            tokens = _argmax(logits)
        else:
            draws, params, asked_at, *changes = self._upload_step(rows, asked)
            logprobs = logits[asked_at].log_softmax(dim=-1)
            self._process_logits(logits, params[4:].float(), changes)
            tokens = _argmax(logits) if len(random) < len(rows) else logits.new_zeros(len(rows)).long()
            if random:
                size = self._rows_at_once
                parts = (logits.split(size), tokens.split(size), params.split(size, 1), draws.split(size, 1))
                methods = _methods_for(random)
                tokens = torch.cat([_draw(*part, methods) for part in zip(*parts, strict=True)])

        def results() -> list[Tensor]:
            if not asked:
                return [tokens]
            most = max(count for count in counts if count is not None)
            return [tokens, _tabulate(logprobs, tokens[asked_at].clamp(min=0), most)]

        def draw_again(undecided: Tensor) -> list[Tensor]:
            for at in undecided.to(self._device).split(_SORTED_ROWS):
                tokens[at] = draw_from_all(logits[at], params[:3, at], draws[-1, at])
            return results()

        is_cuda = self._device.type == "cuda"
        copies = [
            torch.empty(part.shape, dtype=part.dtype, pin_memory=is_cuda).copy_(part, non_blocking=True)
            for part in results()
        ]
        arrived = torch.cuda.Event() if is_cuda else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(self._device))
        return Sample(counts, copies, arrived, draw_again)

    def _upload_step(self, rows: Sequence[SamplingRow], asked: list[int]) -> list[Tensor]:
        """Queue the upload of a step's numbers; keep those that stay, and return the others."""
        at, new = self._assign(rows)
        columns = [_columns_of(rows[index].params) for index in new]
        draws, device_at, new_at, new_params, asked_at, *changes = self._upload(
            uniform_draws([(row.seed, row.position) for row in rows]),
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

    def _new_counts(self, rows: Sequence[SamplingRow], at: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return rows with penalties, counts to clear, (row, token id) of new prompt and output tokens."""
        penalised = [index for index, row in enumerate(rows) if row.params.has_penalties]
        cleared, added = list[int](), ([_NO_TOKENS], [_NO_TOKENS])
        for index in penalised:
            row, state = rows[index], at[index]
            num_counted, num_prompt = self._num_counted[state], len(row.token_ids) - row.position
            if not 0 < num_counted < len(row.token_ids):
                num_counted = num_prompt
                cleared.append(state)
                added[0].append(_tokens_of(state, row.token_ids[:num_prompt]))
            added[1].append(_tokens_of(state, row.token_ids[num_counted:]))
            self._num_counted[state] = len(row.token_ids)
        tokens = [np.concatenate(part, axis=1) for part in added]
        return [np.array(penalised, np.int64), np.array(cleared, np.int64), *tokens]

    def _bitmasks_of(self, rows: Sequence[SamplingRow]) -> tuple[NDArray[Any], ...]:
        """Return the rows with masks of allowed tokens, and the masks, uint8 [those rows, bytes]."""
        masks = [
            (index, bits)
            for index, row in enumerate(rows)
            for bits in (row.allowed_bits, _pack(row.params.allowed_token_ids))
            if bits is not None
        ]
        packed = np.zeros((len(masks), -(-self._vocab_size // 8)), np.uint8)
        for line, (_, bits) in zip(packed, masks, strict=True):
            line[: len(bits)] = np.frombuffer(bits, np.uint8)[: len(line)]
        return np.array([index for index, _ in masks], np.int64), packed

    def _process_logits(self, logits: Tensor, penalties: Tensor, changes: Sequence[Tensor]) -> None:
        """Apply penalties, biases, bans and bit masks in place."""
        at, penalised, cleared, prompt, output, biases, masked, masks = changes
        if len(penalised):
            if self._token_counts is None:
                shape = (self._max_rows, self._vocab_size)
                self._token_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            counts = self._token_counts.index_fill_(0, cleared, 0)
            counts.index_put_((prompt[0], prompt[1]), counts.new_full((), _IN_PROMPT))
            counts.index_put_((output[0], output[1]), counts.new_full((), _IN_OUTPUT), accumulate=True)
            logits[penalised] = _penalise(logits[penalised], counts[at[penalised]], *penalties[:, penalised])
        if biases.shape[1]:
            logits.index_put_((biases[0].long(), biases[1].long()), biases[2].float(), accumulate=True)
        if len(masked):
            bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=self._device) & 1
            is_allowed = bits.flatten(1)[:, : self._vocab_size] > 0
            logits.index_add_(0, masked, torch.where(is_allowed, 0.0, -math.inf))

    def _upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Queue one copy of arrays to the device."""
        starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)]).tolist()
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        host_bytes = host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            host_bytes[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        copy = torch.empty(len(host), dtype=torch.uint8, device=self._device).copy_(host, non_blocking=True)
        kinds = {"f": torch.float64, "i": torch.int64, "u": torch.uint8}
        return [
            copy[start : start + array.nbytes].view(kinds[array.dtype.kind]).view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]


def uniform_draws(positions: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """Return uniform draws in [0, 1) for (seed, position) of rows: hashes, so that no state is needed.

    Returns:
        float64 [attempts + 1, rows, 1]: one per attempt at rejection, and one for the filtered tokens.
    """
    digests = [
        hashlib.blake2b(b"%d:%d" % each, digest_size=8 * (ATTEMPTS + 1)).digest() for each in positions
    ]
    numbers = np.frombuffer(b"".join(digests), ">u8").reshape(len(positions), ATTEMPTS + 1, 1)
    # 40 bits: the product with a total always rounds to less than the total.
    return (numbers >> 24).swapaxes(0, 1) / (1 << 40)


def _methods_for(random: Sequence[SamplingParams]) -> list[tuple[int, Draw]]:
    """Return the ways to draw, to be tried one after the other, each with the index of its draws."""
    is_sorted = [params.top_k > 0 or params.min_p > 0.0 for params in random]
    if not any(is_sorted) and all(params.top_p >= 1.0 for params in random):
        return [(0, lambda probabilities, _, draws: sample_by_inverse_cdf(probabilities, draws))]
    attempts = 0 if all(is_sorted) else ATTEMPTS
    return [*((number, draw_by_rejection) for number in range(attempts)), (ATTEMPTS, draw_from_candidates)]


def _draw(
    logits: Tensor, greedy: Tensor, params: Tensor, draws: Tensor, methods: Sequence[tuple[int, Draw]]
) -> Tensor:
    """Return the token of each row, replacing the logits by unnormalised probabilities; -1 if undecided."""
    filters, temperature = params[:3], params[3]
    divisors = temperature.clamp(GREEDY_BELOW, TEMPERATURE_MAX).float()
    probabilities = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(divisors).exp_()
    tokens = torch.where(temperature.squeeze(1) < GREEDY_BELOW, greedy, -1)
    for number, method in methods:
        at: Tensor | slice = slice(None)
        if tokens.is_cpu:  # on a GPU, asking would wait
            undecided = (tokens < 0).nonzero().flatten()
            at = undecided if len(undecided) < len(tokens) else at
        drawn = method(probabilities[at], filters[:, at], draws[number, at])
        tokens[at] = torch.where(tokens[at] < 0, drawn, tokens[at])
    return tokens


def _argmax(logits: Tensor) -> Tensor:
    # On a CPU numpy is ten times as fast as torch.
    return torch.from_numpy(logits.numpy().argmax(axis=-1)) if logits.is_cpu else logits.argmax(dim=-1)


def _penalise(
    logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits, generated = torch.where(counts > 0, repeated, logits), counts // _IN_OUTPUT
    return torch.where(generated > 0, logits - (frequency * generated + presence), logits)


def _tokens_of(state: int, token_ids: Sequence[int]) -> NDArray[np.int64]:
    """Return (row of the state, token id) of tokens, int64 [2, tokens]."""
    return np.array([np.full(len(token_ids), state), token_ids], np.int64)


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


def _tabulate(logprobs: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """Return log probabilities of sampled and of top tokens, and their ids: float64 [rows, 1 + 2 x most]."""
    top = logprobs.topk(most, dim=-1)
    return torch.cat((logprobs.gather(1, token_ids[:, None]).double(), top.values, top.indices), dim=1)


def _read_line(line: list[float], count: int) -> TokenLogprobs:
    own, values, token_ids = line[0], line[1:], map(int, line[1 + len(line) // 2 :])
    return TokenLogprobs(own, tuple(zip(token_ids, values, strict=False))[:count])
