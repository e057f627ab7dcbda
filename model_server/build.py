"""Makes an engine: loads the model, takes memory for its KV, puts the parts together.

In: the settings. Out: an engine that does not run yet.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import torch

from model_server.attention import KvGroupSpec
from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine import Engine
from model_server.errors import ConfigError
from model_server.events import EventSink
from model_server.lora_registry import LoraRegistry
from model_server.prefix import blocks_behind, blocks_bound
from model_server.runner import TorchRunner, layer_groups
from model_server.tiny import load_tiny
from model_server.weights import load_checkpoint, torch_device


def build_engine(config: EngineConfig, sink: EventSink) -> Engine:
    """Load the model and make an engine for it, not yet started.

    Args:
        config: Which model, and how much of everything.
        sink: Where the cache events of each step go.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        ConfigError: A setting does not fit the model or the machine.
    """
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    device = torch_device(config.device)
    if config.model == TINY_MODEL:
        loaded = load_tiny(config.dtype, device)
    else:
        loaded = load_checkpoint(Path(config.model), config.dtype, device)
    max_model_len = _max_model_len(config, loaded.max_positions, layer_groups(loaded.model))
    runner = TorchRunner(
        loaded.model,
        loaded.eos_token_ids,
        num_blocks=config.gpu_blocks,
        block_tokens=config.block_tokens,
        fp8_kv=config.kv_cache_dtype == "fp8",
    )
    return Engine(config, runner, sink, max_model_len, LoraRegistry(loaded.model, config.max_loras))


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
