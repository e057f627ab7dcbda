"""The KV cache of one engine: both tiers, the traffic between them, and who moves blocks."""

from typing import Any

from model_server.block_manager import BlockManager
from model_server.blocks import BlockPool
from model_server.config import EngineConfig
from model_server.errors import ConfigError
from model_server.events import MEDIUM_CPU, MEDIUM_GPU, Announcer, BlockContent
from model_server.executor import Executor
from model_server.offload import HostTier, Offload


class KvCache:
    """All parts of the cache; a ConfigError where the longest request allowed does not fit."""

    def __init__(self, config: EngineConfig, executor: Executor, max_model_len: int) -> None:
        self.announcer = announcer = Announcer(executor.kv_groups, config.block_tokens)  # writes the events
        self.pool = BlockPool(config.gpu_blocks, announcer)  # the device's blocks
        self.host = HostTier(_host_blocks(config, executor), announcer, self.pool.announce)  # the host tier's
        self.offload = Offload(self.pool, self.host, executor)  # the traffic between them
        executor.allocate_host(self.host.num_blocks)
        # Gives blocks to requests.
        self.manager = BlockManager(
            self.pool,
            self.offload,
            executor.kv_groups,
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

    def stats(self) -> dict[str, Any]:
        pool, host, offload = self.pool, self.host, self.offload
        return {
            "kv_usage": 1.0 - pool.num_free / pool.num_blocks,
            "total_blocks": pool.num_blocks,
            "host_blocks": host.num_blocks,
            "host_usage": host.num_used / max(1, host.num_blocks),
            "swapped_in_blocks": offload.swapped_in_blocks,
            "swapped_out_blocks": offload.swapped_out_blocks,
            "block_bytes": offload.block_bytes,
            "restores": offload.restores,
        }

    def contents(self) -> dict[str, list[BlockContent]]:
        """Return what can be found in each tier, by medium; a content once for each copy."""
        return {
            MEDIUM_GPU: [block.content for block in self.pool.blocks if block.content is not None],
            MEDIUM_CPU: [block.content for block in self.host.kept.values() if block.ready],
        }

    def reset(self) -> bool:
        """Forget the content of both tiers; returns False, with nothing forgotten, while blocks are held."""
        self.offload.drain()
        if self.host.is_held or not self.pool.reset():  # held: by requests that are swapped out
            return False
        self.host.clear()
        return True


def _host_blocks(config: EngineConfig, executor: Executor) -> int:
    if config.cpu_gib is None:
        return config.cpu_blocks
    return int(config.cpu_gib * 2**30) // executor.block_bytes
