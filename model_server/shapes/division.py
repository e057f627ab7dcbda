"""Which part of a decoder one of several processes computes (tensor parallelism, arXiv 1909.08053).

In: a shape and a rank. Out: the shape of the rank's part, and where that lies in the checkpoint's tensors.
Query heads, the MLP's width and the vocabulary are divided evenly, KV heads too, or repeated where they are
fewer than ranks. It knows neither tensors nor processes.
"""

from dataclasses import dataclass, replace

from model_server.errors import ConfigError
from model_server.shapes.shape import DecoderShape


@dataclass(frozen=True, slots=True)
class Share:
    """A contiguous part of one dimension."""

    first: int  # where it begins
    count: int  # how long it is
    whole: int  # how long the dimension is

    @classmethod
    def all_of(cls, whole: int) -> "Share":
        """Return the whole dimension."""
        return cls(0, whole, whole)

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self.count == self.whole

    @property
    def span(self) -> slice:
        """The same as a slice."""
        return slice(self.first, self.first + self.count)

    def times(self, width: int) -> "Share":
        """Return the share in units of which each of these has `width`."""
        return Share(self.first * width, self.count * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class Division:
    """One rank of several."""

    rank: int = 0  # from 0
    size: int = 1  # how many there are

    def heads(self, shape: DecoderShape) -> Share:
        """Return the rank's query heads."""
        return self._even(shape.heads)

    def kv_heads(self, shape: DecoderShape) -> Share:
        """Return the KV heads that its query heads read; with fewer heads than ranks, one of them."""
        whole = shape.kv_heads
        return Share(self.rank * whole // self.size, max(1, whole // self.size), whole)

    def intermediate(self, shape: DecoderShape) -> Share:
        """Return its columns of the MLP."""
        return self._even(shape.intermediate)

    def vocabulary(self, shape: DecoderShape) -> Share:
        """Return its tokens: as many as `vocabulary_rows`, the last ranks' fewer or none."""
        first = min(self.rank * self.vocabulary_rows(shape), shape.vocab_size)
        return Share(first, min(self.vocabulary_rows(shape), shape.vocab_size - first), shape.vocab_size)

    def vocabulary_rows(self, shape: DecoderShape) -> int:
        """Return how many rows of the embedding each rank has room for, the same for all."""
        return -(-shape.vocab_size // self.size)

    def part_of(self, shape: DecoderShape) -> DecoderShape:
        """Return the shape of what the rank computes; its vocabulary is the whole one still."""
        return replace(
            shape,
            heads=self.heads(shape).count,
            kv_heads=self.kv_heads(shape).count,
            intermediate=self.intermediate(shape).count,
        )

    def _even(self, whole: int) -> Share:
        count = whole // self.size
        return Share(self.rank * count, count, whole)


def check_divisible(shape: DecoderShape, size: int) -> None:
    """Refuse a number of ranks that a model cannot be divided by.

    Raises:
        ConfigError: Heads or the MLP's width do not divide; it names the numbers that do.
    """
    if divides(shape, size):
        return
    good = [str(number) for number in range(1, shape.heads + 1) if divides(shape, number)]
    raise ConfigError(
        f"tensor_parallel_size is {size}, but the model's {shape.heads} query heads, {shape.kv_heads} KV "
        f"heads and MLP of width {shape.intermediate} cannot be divided by it; use one of {', '.join(good)}"
    )


def divides(shape: DecoderShape, size: int) -> bool:
    """Tell whether a model can be divided among so many ranks."""
    kv_heads = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv_heads and shape.heads % size == 0 and shape.intermediate % size == 0
