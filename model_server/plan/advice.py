"""What to choose: how many GPUs share a model, and whether a preempted sequence is computed again or copied.

In: a deployment, a budget and a GPU's speeds. Out: the options side by side, and the one to take. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model_server.plan.deployment import Deployment
from model_server.plan.gpus import Gpu
from model_server.plan.pool import Budget, Pool
from model_server.plan.throughput import link_s, prefill_s
from model_server.shapes import divides

PARALLEL_SIZES = (1, 2, 4, 8)  # a node's
# With a share h left for KV, twice the GPUs have (1 + h) / h times the pool: at a third four times, twice for
# each GPU. Below it the GPUs mostly repeat weights.
ENOUGH_HEADROOM = 1 / 3


@dataclass(frozen=True, slots=True)
class ParallelOption:
    """A model on so many GPUs.

    Attributes:
        tensor_parallel: The GPUs.
        gpu_weights_bytes: Weights on each.
        gpu_pool_bytes: What is left for KV on each; below 0 if the weights do not fit.
        headroom: That as a share of what weights and KV have together.
        sequences: Held at once, on all of them together.
    """

    tensor_parallel: int
    gpu_weights_bytes: int
    gpu_pool_bytes: int
    headroom: float
    sequences: int

    @property
    def fits(self) -> bool:
        """Whether there is room for the weights and a sequence."""
        return self.sequences > 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """What it takes until a preempted sequence can go on.

    Attributes:
        tokens: Of the sequence.
        recompute_s: Computing its KV again.
        swap_s: Copying it to the host and back.
        even_link_bytes_per_s: Speed of the link to the host at which both take equally long.
    """

    tokens: int
    recompute_s: float
    swap_s: float
    even_link_bytes_per_s: float

    @property
    def mode(self) -> Literal["recompute", "swap"]:
        """The one that takes less time; as the engine's --preemption-mode."""
        return "swap" if self.swap_s < self.recompute_s else "recompute"


def parallel_options(
    deployment: Deployment, budget: Budget, context_tokens: int
) -> tuple[ParallelOption, ...]:
    """Return what each number of GPUs gives that the model can be divided among."""
    sizes = {*PARALLEL_SIZES, deployment.tensor_parallel}
    possible = (size for size in sorted(sizes) if divides(deployment.shape, size))
    pools = [Pool(replace(deployment, tensor_parallel=size), budget) for size in possible]
    return tuple(
        ParallelOption(
            pool.deployment.tensor_parallel,
            pool.deployment.gpu_weights_bytes,
            pool.gpu_bytes,
            pool.headroom,
            pool.sequences(context_tokens),
        )
        for pool in pools
    )


def advised(options: Sequence[ParallelOption]) -> ParallelOption | None:
    """Return the least number of GPUs with enough headroom, else the largest that fits, else None."""
    fitting = [option for option in options if option.fits]
    return next(
        (option for option in fitting if option.headroom >= ENOUGH_HEADROOM), fitting[-1] if fitting else None
    )


def preemption(deployment: Deployment, gpu: Gpu, context_tokens: int) -> Preemption:
    """Weigh recomputing a sequence of this length against swapping it."""
    recompute_s = prefill_s(deployment, gpu, context_tokens)
    swap_s = 2 * link_s(deployment, gpu, context_tokens)
    return Preemption(context_tokens, recompute_s, swap_s, gpu.link_bytes_per_s * swap_s / recompute_s)
