"""Decode steps captured as CUDA graphs: one launch instead of hundreds.

A graph is captured for some numbers of sequences; a step with fewer is padded with sequences that have no
context, which write nowhere and which nothing reads.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

_SIZES = (1, 2, 4, 8, *range(16, 257, 16))


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Launch the captured work."""


# Captures a function's work, and returns the graph and the tensor that holds the function's result.
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Graph, Tensor]]


class DecodeGraphs:
    """Graphs by number of sequences, captured at once.

    Args:
        max_sequences: Maximum of sequences of a step.
        prepare: Prepares a step of a number of padding sequences, and returns the function that computes its
            logits from addresses which later steps of as many sequences share.
        capture: Captures a step.
    """

    def __init__(
        self, max_sequences: int, prepare: Callable[[int], Callable[[], Tensor]], capture: Capture
    ) -> None:
        self._sizes = graph_sizes(max_sequences)
        # Largest first: smaller ones then fit in the memory that it took.
        self._graphs = {size: capture(prepare(size)) for size in reversed(self._sizes)}

    def size_for(self, sequences: int) -> int | None:
        """Return the number of sequences to pad a step to, or None if it has more than any graph."""
        index = bisect_left(self._sizes, sequences)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> Tensor:
        """Launch the step of this size; return its logits, valid until the next replay."""
        graph, logits = self._graphs[size]
        graph.replay()
        return logits


def graph_sizes(max_sequences: int) -> Sequence[int]:
    """Return the numbers of sequences to capture, ascending; the last covers `max_sequences` up to 256."""
    return _SIZES[: bisect_left(_SIZES, max_sequences) + 1]


def cuda_capture() -> Capture:
    """Return a `Capture` on CUDA, whose graphs share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        # Libraries allocate and choose their algorithms in the first run, which must not be captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: they serve requests.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = run()
        return graph, logits

    return capture
