"""How much KV a GPU's memory holds beside the weights, and how many sequences that is.

In: a deployment and a memory budget. Out: the pool in bytes, blocks and tokens. Pure.
"""

from bisect import bisect_right
from dataclasses import dataclass

from model_server.errors import ConfigError
from model_server.plan.deployment import Deployment

# What is taken off each GPU for activations, the CUDA context and its libraries. 2 GB with nine tenths of the
# memory is what published sizings of 8-billion models on 80 GB come out with.
DEFAULT_UTILIZATION = 0.9
DEFAULT_RESERVE_BYTES = 2 * 10**9


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of each GPU, and how much of it may be used.

    Attributes:
        memory_bytes: All of it.
        utilization: Share of it for weights, reserve and KV; as vLLM's --gpu-memory-utilization.
        reserve_bytes: What of that share is neither weights nor KV.

    Raises:
        ConfigError: A value is out of range.
    """

    memory_bytes: int
    utilization: float = DEFAULT_UTILIZATION
    reserve_bytes: int = DEFAULT_RESERVE_BYTES

    def __post_init__(self) -> None:
        """Refuse what is no memory."""
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"gpu memory utilization is {self.utilization}; it must be above 0, at most 1")
        if not 0 <= self.reserve_bytes < self.usable_bytes:
            raise ConfigError(
                f"a reserve of {self.reserve_bytes / 1e9:.1f} GB does not leave any of the "
                f"{self.usable_bytes / 1e9:.1f} GB that may be used"
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights, reserve and KV."""
        return int(self.memory_bytes * self.utilization)


@dataclass(frozen=True, slots=True)
class Pool:
    """What is left for KV on each GPU.

    Attributes:
        deployment: What it is the pool of.
        budget: Of each GPU.
    """

    deployment: Deployment
    budget: Budget

    @property
    def gpu_bytes(self) -> int:
        """Bytes for KV on each GPU; below 0 where the weights do not fit."""
        taken = self.budget.reserve_bytes + self.deployment.gpu_weights_bytes
        return self.budget.usable_bytes - taken

    @property
    def blocks(self) -> int:
        """KV blocks."""
        return max(0, self.gpu_bytes) // self.deployment.gpu_block_bytes

    @property
    def tokens(self) -> int:
        """Tokens of the pool, groups of layers counted like tokens: blocks by their size."""
        return self.blocks * self.deployment.block_tokens

    @property
    def headroom(self) -> float:
        """Share of the memory for weights and KV that is left for KV; below 0 if the weights do not fit."""
        return self.gpu_bytes / (self.budget.usable_bytes - self.budget.reserve_bytes)

    def sequences(self, context_tokens: int) -> int:
        """Return how many sequences of this length are held at once, one of them still in its prefill."""
        return sequences_in(self.deployment, self.blocks, context_tokens)

    def longest_context(self, limit: int) -> int:
        """Return how long a text fits when it is alone there, at most `limit` tokens."""
        return bisect_right(range(limit + 1), self.blocks, key=self.deployment.prefilling_blocks) - 1


def sequences_in(deployment: Deployment, blocks: int, context_tokens: int) -> int:
    """Return how many sequences of this length a pool of so many blocks holds at once."""
    first = deployment.prefilling_blocks(context_tokens)
    return 0 if blocks < first else 1 + (blocks - first) // deployment.decoding_blocks(context_tokens)
