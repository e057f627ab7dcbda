"""Batches of the sampler, compared with its definition row by row; and no call that waits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_server.requests import SamplingParams, TokenLogprobs
from model_server.worker.sampler import Sampler, SamplingRow
from tests.support.depth import examples
from tests.support.model_server.fake_device import META, FakeDevice
from tests.support.model_server.sampling import sample, sample_by_definition

CPU = torch.device("cpu")
VOCAB_SIZE = 300
MAX_ROWS = 4

token_ids = st.integers(0, VOCAB_SIZE - 1)
wishes = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1e38]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    top_k=st.sampled_from([0, 0, 1, 40, 257]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.75, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, 2.0, 5.0]), max_size=3),
    allowed_token_ids=st.none() | st.frozensets(token_ids, min_size=200),
    logprobs=st.none() | st.integers(0, 3),
)


def bitmask(generator: np.random.Generator) -> bytes:
    """Return the bits of about half of the tokens, shorter or longer than the vocabulary."""
    return generator.bytes(int(generator.integers(20, 50)))


class Stream:
    """One request: its tokens so far."""

    def __init__(self, params: SamplingParams, arrival_index: int, generator: np.random.Generator) -> None:
        self.params, self.arrival_index = params, arrival_index
        self.token_ids = [
            int(token) for token in generator.integers(0, VOCAB_SIZE, int(generator.integers(1, 9)))
        ]
        self.num_prompt_tokens = len(self.token_ids)
        self.is_constrained = generator.random() < 0.2

    def row(self, generator: np.random.Generator) -> SamplingRow:
        """Return the row of the next token."""
        banned = frozenset(generator.integers(0, VOCAB_SIZE, 3).tolist() if generator.random() < 0.3 else [])
        bits = bitmask(generator) if self.is_constrained else None
        position = len(self.token_ids) - self.num_prompt_tokens
        return SamplingRow(
            self.params, self.arrival_index + 7, position, banned, self.token_ids, bits, self.arrival_index
        )


def by_definition(logits: Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Return the tokens and log probabilities of their definitions."""
    tokens = [sample_by_definition(line, row) for line, row in zip(logits.tolist(), rows, strict=True)]
    logprobs = logits.double().log_softmax(-1)
    return tokens, [
        None
        if row.params.logprobs is None
        else TokenLogprobs(line[token].item(), best(line, row.params.logprobs))
        for line, row, token in zip(logprobs, rows, tokens, strict=True)
    ]


def best(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the most probable tokens."""
    ordered = logprobs.sort(descending=True, stable=True)
    return tuple(zip(ordered.indices[:count].tolist(), ordered.values[:count].tolist(), strict=True))


def assert_close(found: list[TokenLogprobs | None], wanted: list[TokenLogprobs | None]) -> None:
    """Compare log probabilities."""
    assert [entry is None for entry in found] == [entry is None for entry in wanted]
    for one, other in zip(found, wanted, strict=True):
        if one is not None and other is not None:
            assert one.chosen == pytest.approx(other.chosen, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx(
                [value for _, value in other.top], abs=1e-5
            )


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(st.lists(wishes, min_size=1, max_size=7), st.integers(0, 2**32), st.sampled_from([0.5, 2.0, 6.0]))
def test_tokens_are_those_of_the_definition(wanted: list[SamplingParams], seed: int, spread: float) -> None:
    """Requests that join, pause and leave get the tokens and log probabilities of the definition."""
    generator = np.random.default_rng(seed)
    sampler = Sampler(MAX_ROWS, VOCAB_SIZE, CPU)
    streams = [Stream(params, index, generator) for index, params in enumerate(wanted)]
    for _ in range(8):
        size = int(generator.integers(1, min(MAX_ROWS, len(streams)) + 1))
        batch = [streams[index] for index in generator.permutation(len(streams))[:size].tolist()]
        rows = [stream.row(generator) for stream in batch]
        logits = torch.from_numpy(spread * generator.standard_normal((size, VOCAB_SIZE), np.float32))
        tokens, logprobs = by_definition(logits, rows)
        found, entries = sampler.launch(logits, rows).result()
        assert found == tokens
        assert_close(entries, logprobs)
        for stream, token in zip(batch, tokens, strict=True):
            stream.token_ids.append(token)


@pytest.mark.parametrize("vocab_size", [5, 128, 1000])
def test_rejected_draws_are_those_of_the_definition(vocab_size: int) -> None:
    """Tokens are those of the definition where top_p rejects most draws, in vocabularies of any size."""
    logits = torch.linspace(1.0, 0.0, vocab_size).repeat(64, 1)
    params = [SamplingParams(max_tokens=1, top_p=top_p, logprobs=1) for top_p in (0.02, 0.3, 0.9, 1.0)] * 16
    rows = [SamplingRow(each, 5, index, arrival_index=index) for index, each in enumerate(params)]
    tokens, logprobs = by_definition(logits, rows)
    found, entries = Sampler(64, vocab_size, CPU).launch(logits, rows).result()
    assert found == tokens
    assert_close(entries, logprobs)


def test_a_step_that_is_sampled_again_gives_the_same_tokens() -> None:
    """Tokens are counted once, even if a position is sampled twice or an earlier one again."""
    params = SamplingParams(max_tokens=1, frequency_penalty=1.5, repetition_penalty=1.5)
    sampler = Sampler(1, VOCAB_SIZE, CPU)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    for position in (1, 3, 3, 2, 3):
        row = SamplingRow(params, 1, position, token_ids=[7, 7, *range(position)])
        assert sampler.launch(logits.clone(), [row]).result()[0] == sample(logits.clone(), [row])


def test_results_of_inference_mode_are_read_outside_it() -> None:
    """Logits of inference mode can be sampled outside it, even where the draw is repeated for the result."""
    row = SamplingRow(SamplingParams(max_tokens=1, top_k=257, frequency_penalty=1.0), 1, 1, token_ids=[4, 5])
    with torch.inference_mode():
        sampler = Sampler(1, VOCAB_SIZE, CPU)
        logits = torch.zeros(1, VOCAB_SIZE)
    wanted = sample(torch.zeros(1, VOCAB_SIZE), [row])
    assert sampler.launch(logits, [row]).result()[0] == wanted


@pytest.mark.parametrize("at_once", [1, 2 * VOCAB_SIZE, 1 << 20])
def test_tokens_do_not_depend_on_the_rows_of_a_pass(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where few rows are drawn at once, each row gets the token that it gets alone."""
    logits = torch.randn(len(FEATURES), VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    rows = [SamplingRow(params, 3, 0) for params in FEATURES.values()]
    alone = [sample(line[None], [row])[0] for line, row in zip(logits, rows, strict=True)]
    monkeypatch.setattr("model_server.worker.sampler.CPU_BATCH_LOGITS", at_once)
    assert sample(logits, rows) == alone


FEATURES = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "random": SamplingParams(max_tokens=1),
    "top_p": SamplingParams(max_tokens=1, top_p=0.9),
    "filters": SamplingParams(max_tokens=1, top_k=20, min_p=0.1, logprobs=2),
    "changes": SamplingParams(
        max_tokens=1,
        repetition_penalty=1.2,
        frequency_penalty=1.0,
        logit_bias={3: 1.0},
        allowed_token_ids=frozenset({3, 5}),
    ),
}


@pytest.mark.parametrize("names", [[], *([name] for name in FEATURES), list(FEATURES)], ids="-".join)
def test_launch_waits_for_nothing(names: list[str]) -> None:
    """A step takes one copy to the device, or none if all is greedy, up to two from it; waits for none."""
    rows = [
        SamplingRow(FEATURES[name], 1, 1, frozenset({2}), [4, 5, 5], b"\xff" * 40, index)
        for index, name in enumerate(names)
    ]
    sampler = Sampler(8, VOCAB_SIZE, META)
    for step in range(2):
        logits = torch.zeros(len(rows) or 3, VOCAB_SIZE, device=META)
        with FakeDevice() as device:
            sampler.launch(logits, rows)
        assert device.uploads == (names != []), step
        assert device.downloads == 1 + any(row.params.logprobs is not None for row in rows)
