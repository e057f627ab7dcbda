"""Makes an engine: loads the model, takes memory for its KV, puts the parts together.

In: the settings. Out: an engine that does not run yet.
"""

from bisect import bisect_right
from collections.abc import Sequence

from model_server.config import EngineConfig
from model_server.engine import Engine
from model_server.errors import ConfigError
from model_server.events import EventSink
from model_server.executor import Executor
from model_server.lora_registry import LoraRegistry
from model_server.prefix import blocks_behind, blocks_bound
from model_server.shapes import KvGroupSpec


def build_engine(config: EngineConfig, sink: EventSink) -> Engine:
    """Load the model and make an engine for it, not yet started.

    Args:
        config: Which model, and how much of everything.
        sink: Where the cache events of each step go.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        ConfigError: A setting does not fit the model or the machine.
        WorkerError: A process that should compute a part of the model does not start.
    """
    executor = Executor(config)
    try:
        max_model_len = _max_model_len(config, executor.max_positions, executor.kv_groups)
        loras = LoraRegistry(executor.load_adapter, config.max_loras)
        return Engine(config, executor, sink, max_model_len, loras)
    except BaseException:
        executor.close()
        raise


def most_tokens(config: EngineConfig, max_positions: int, groups: Sequence[KvGroupSpec]) -> int:
    """Return how long a text fits into the pool when it is alone there."""
    needs = [blocks_behind(group.window_tokens, config.block_tokens) for group in groups]

    def blocks(num_tokens: int) -> int:
        return blocks_bound(needs, num_tokens, config.max_num_batched_tokens, config.block_tokens)

    return bisect_right(range(max_positions + 1), config.gpu_blocks, key=blocks) - 1


def _max_model_len(config: EngineConfig, max_positions: int, groups: Sequence[KvGroupSpec]) -> int:
    if config.max_model_len is None:
        return most_tokens(config, max_positions, groups)
    if config.max_model_len > max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for {max_positions} positions"
        )
    return config.max_model_len
