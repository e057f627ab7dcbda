"""The KV cache of one engine: both tiers, the traffic between them, and who moves blocks.

In: the settings and what computes the steps. Out: the parts, put together. Knows no requests.
"""

from model_server.block_content import Announcer
from model_server.block_manager import BlockManager
from model_server.blocks import BlockPool
from model_server.config import EngineConfig
from model_server.errors import ConfigError
from model_server.host_tier import HostTier
from model_server.offload import Offload
from model_server.step_runner import Runner


class KvCache:
    """All parts of the cache.

    Attributes:
        pool: The device's blocks.
        host: The host tier's.
        offload: The traffic between them.
        manager: Gives blocks to requests.

    Raises:
        ConfigError: The longest request allowed does not fit.
    """

    def __init__(self, config: EngineConfig, runner: Runner, max_model_len: int) -> None:
        announcer = Announcer(runner.kv_groups, config.block_tokens)
        self.pool = BlockPool(config.gpu_blocks, announcer)
        self.host = HostTier(_host_blocks(config, runner), announcer, self.pool.announce)
        self.offload = Offload(self.pool, self.host, runner.block_copies(self.host.num_blocks))
        self.manager = BlockManager(
            self.pool,
            self.offload,
            runner.kv_groups,
            block_tokens=config.block_tokens,
            chunk_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            swap=config.preemption_mode == "swap",
        )
        if (needed := self.manager.blocks_bound(max_model_len)) > config.gpu_blocks:
            # With this a request that runs alone always fits, so preemption cannot go round in circles.
            raise ConfigError(
                f"max_model_len is {max_model_len}, which takes {needed} blocks of {config.block_tokens} "
                f"tokens, but there are {config.gpu_blocks}; add blocks or lower max_model_len"
            )

    def reset(self) -> bool:
        """Forget the content of both tiers; returns False, with nothing forgotten, while blocks are held."""
        self.offload.drain()
        if self.host.is_held or not self.pool.reset():  # held: by requests that are swapped out
            return False
        self.host.clear()
        return True


def _host_blocks(config: EngineConfig, runner: Runner) -> int:
    if config.cpu_gib is None:
        return config.cpu_blocks
    return int(config.cpu_gib * 2**30) // runner.block_bytes
