"""Construction of an engine: loads the model, allocates KV memory, and logs its size."""

import logging
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import torch

from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine.core import EngineCore
from model_server.errors import ConfigError
from model_server.kv_events.events import EventPublisher
from model_server.model.lora import LoraRegistry
from model_server.shapes import (
    DTYPE_BYTES,
    TINY_CONFIG,
    KvGroupSpec,
    blocks_behind,
    blocks_bound,
    computed_dtype,
    decoder_shape,
    read_config,
)
from model_server.shapes.deployment import Budget, Deployment, Pool
from model_server.worker.executor import Executor

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, publisher: EventPublisher) -> EngineCore:
    """Load the model and return an engine, not started; may raise any ModelServerError."""
    executor = Executor(config)
    try:
        max_model_len = _max_model_len(config, executor.max_positions, executor.kv_groups)
        loras = LoraRegistry(executor.load_adapter, config.max_loras)
        return EngineCore(config, executor, publisher, max_model_len, loras)
    except BaseException:
        executor.close()
        raise


def max_request_tokens(config: EngineConfig, max_positions: int, groups: Sequence[KvGroupSpec]) -> int:
    """Return the most tokens of one request that fit into the pool."""
    needs = [blocks_behind(group.window_tokens, config.block_tokens) for group in groups]

    def blocks(num_tokens: int) -> int:
        return blocks_bound(needs, num_tokens, config.max_num_batched_tokens, config.block_tokens)

    return bisect_right(range(max_positions + 1), config.gpu_blocks, key=blocks) - 1


def _max_model_len(config: EngineConfig, max_positions: int, groups: Sequence[KvGroupSpec]) -> int:
    if config.max_model_len is None:
        return max_request_tokens(config, max_positions, groups)
    if config.max_model_len > max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model has only {max_positions} positions"
        )
    return config.max_model_len


def log_pool(engine: EngineCore, config: EngineConfig) -> None:
    """Log the size of the KV cache, measured and planned."""
    device = torch.device(config.device)
    blocks = engine.stats().total_blocks
    tokens, longest = blocks * engine.block_tokens, engine.max_model_len
    logger.info(
        "%s KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
        "CPU" if device.type == "cpu" else "GPU",
        f"{tokens:,}",
        f"{longest:,}",
        tokens / longest,
    )
    deployment = deployment_of(config)
    logger.info("KV pool: %s", deployment.pool_line(blocks, longest))
    if device.type == "cuda":
        budget = Budget(torch.cuda.get_device_properties(device).total_memory)
        planned = deployment.pool_line(Pool(deployment, budget).blocks, longest)
        logger.info("kvroute plan, %g of this device's memory: %s", budget.utilization, planned)


def deployment_of(config: EngineConfig) -> Deployment:
    """Return the deployment that an engine's settings describe, or raise a ModelError."""
    is_tiny = config.model == TINY_MODEL
    model = TINY_CONFIG if is_tiny else read_config(Path(config.model) / "config.json")
    return Deployment(
        decoder_shape(model),
        weight_bytes=DTYPE_BYTES[computed_dtype(model, config.dtype)],
        fp8_kv=config.kv_cache_dtype == "fp8",
        tensor_parallel=config.tensor_parallel_size,
        block_tokens=config.block_tokens,
        chunk_tokens=config.max_num_batched_tokens,
    )
