"""Captured decode steps, with a device that records: sizes, padding, and addresses that stay."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model_server.worker.cuda_graphs import DecodeGraphs, Graph, graph_sizes
from model_server.worker.step_arena import StepArena, arena_bytes

CPU = torch.device("cpu")


class Recorded:
    """A captured step, which a replay computes again from the addresses of its capture."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run, self.result, self.replays = run, run(), 0

    def replay(self) -> None:
        """Compute the step again."""
        self.replays += 1
        self.result.copy_(self.run())


def record(run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
    """Capture a step."""
    recorded = Recorded(run)
    return recorded, recorded.result


@pytest.mark.parametrize("most", [1, 3, 8, 9, 64, 100, 256])
def test_every_batch_up_to_the_maximum_has_a_graph(most: int) -> None:
    """The smallest graph that holds a batch is chosen, and pads it by less than a half or 15."""
    graphs = DecodeGraphs(most, lambda size: lambda: torch.zeros(size), record)
    for sequences in range(1, most + 1):
        size = graphs.size_for(sequences)
        assert size is not None
        assert sequences <= size < max(2 * sequences, sequences + 16)


def test_larger_batches_have_none() -> None:
    """A batch beyond the largest graph runs without one."""
    graphs = DecodeGraphs(1000, lambda size: lambda: torch.zeros(size), record)
    assert graphs.size_for(256) == 256
    assert graphs.size_for(257) is None
    assert graph_sizes(1000) == graph_sizes(256)


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_replay_reads_the_numbers_of_its_step(steps: list[list[int]]) -> None:
    """What is put after a capture, in the same order, is what its replay computes with."""
    arena = StepArena(4096, CPU)

    def prepare(numbers: list[int], tail: int = 0) -> Callable[[], Tensor]:
        arena.begin()
        ids = arena.put(np.array(numbers, np.int32))
        positions = arena.put(np.array(numbers, np.float64) + 1.0)
        arena.put(np.zeros(tail, np.int32))  # block tables, of any length
        arena.upload()
        return lambda: ids * positions

    graphs = DecodeGraphs(4, lambda size: prepare([0] * size), record)
    for index, numbers in enumerate(steps):
        size = graphs.size_for(len(numbers))
        assert size is not None
        prepare(numbers + [0] * (size - len(numbers)), tail=index)
        got = graphs.replay(size)[: len(numbers)]
        assert got.tolist() == [number * (number + 1.0) for number in numbers]


def test_an_arena_holds_the_largest_step() -> None:
    """The bytes that are reserved suffice for every field of the largest step."""
    tokens, sequences, groups, blocks = 50, 7, 3, 11
    arena = StepArena(arena_bytes(tokens=tokens, sequences=sequences, groups=groups, blocks=blocks), CPU)
    arena.begin()
    for count in (tokens, tokens, sequences, sequences + 1, sequences, groups * sequences):
        arena.put(np.zeros(count, np.int32))
    arena.put(np.zeros(groups * sequences * blocks, np.int32))
    for _ in range(sequences):  # rows of one adapter each, all and sampled ones
        arena.put(np.zeros(tokens // sequences, np.int32))
        arena.put(np.zeros(1, np.int32))
    arena.upload()
