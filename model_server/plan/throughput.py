"""How fast tokens come: the time of a decode step, and what of it binds.

In: a deployment and a GPU's speeds. Out: seconds and rates. A roof, not a forecast: it counts what must be
read and computed, all weights once a step, and leaves out what GPUs of one model say to each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from model_server.plan.deployment import Deployment
from model_server.plan.gpus import Gpu

Bound = Literal["weights bandwidth", "KV bandwidth", "compute"]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step in which every sequence of a batch gets a token.

    Attributes:
        batch: Sequences.
        weights_s: Reading the weights.
        kv_s: Reading the KV of all sequences.
        compute_s: The arithmetic, which goes on meanwhile.
    """

    batch: int
    weights_s: float
    kv_s: float
    compute_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return max(self.weights_s + self.kv_s, self.compute_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, of all sequences."""
        return self.batch / self.step_s

    @property
    def bound(self) -> Bound:
        """What to have more of to be faster."""
        if self.compute_s > self.weights_s + self.kv_s:
            return "compute"
        return "weights bandwidth" if self.weights_s >= self.kv_s else "KV bandwidth"


def decode_step(deployment: Deployment, gpu: Gpu, batch: int, context_tokens: int) -> DecodeStep:
    """Return the step of a batch whose sequences all have this many tokens."""
    read = batch * deployment.gpu_kv_read_bytes(context_tokens)
    flops = batch * deployment.decode_flops(context_tokens) / deployment.tensor_parallel
    return DecodeStep(
        batch,
        weights_s=deployment.gpu_weights_bytes / gpu.memory_bytes_per_s,
        kv_s=read / gpu.memory_bytes_per_s,
        compute_s=flops / gpu.flops_per_s,
    )


def batches(most: int, asked: int | None = None) -> Iterator[int]:
    """Yield powers of two up to `most`, and `most` itself; in order, with the batch that was asked for."""
    sizes = {1 << power for power in range(most.bit_length())} | {most}
    yield from sorted(sizes if asked is None else sizes | {asked})


def prefill_s(deployment: Deployment, gpu: Gpu, tokens: int) -> float:
    """Return the seconds of computing a prompt of which nothing is cached."""
    compute_s = deployment.prefill_flops(tokens) / deployment.tensor_parallel / gpu.flops_per_s
    return max(compute_s, deployment.gpu_weights_bytes / gpu.memory_bytes_per_s)


def link_s(deployment: Deployment, gpu: Gpu, tokens: int) -> float:
    """Return the seconds of copying a text's KV between host and GPUs, one way, each over its own link."""
    copied = deployment.decoding_blocks(tokens) * deployment.gpu_block_bytes
    return copied / gpu.link_bytes_per_s
