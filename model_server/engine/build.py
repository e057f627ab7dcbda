"""Construction of an engine: loads the model, allocates KV memory, and logs its size."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine.core import EngineCore
from model_server.errors import ConfigError
from model_server.kv_events.events import PublishEvents
from model_server.shapes.deployment import Budget, Deployment, Pool
from model_server.shapes.hf_config import TINY_CONFIG, read_config
from model_server.worker.executor import Executor

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, publish: PublishEvents | None = None) -> EngineCore:
    """Load the model and return an engine, not started; may raise any ModelServerError."""
    executor = Executor(config)
    config = replace(config, gpu_blocks=executor.num_blocks)
    try:
        return EngineCore(config, executor, publish, _max_model_len(config, executor.max_positions))
    except BaseException:
        executor.close()
        raise


def _max_model_len(config: EngineConfig, max_positions: int) -> int:
    if config.max_model_len is None:
        assert config.gpu_blocks is not None
        return deployment_of(config).longest_context(config.gpu_blocks, max_positions)
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
        assert config.gpu_memory_utilization is not None
        budget = Budget(torch.cuda.get_device_properties(device).total_memory, config.gpu_memory_utilization)
        planned = deployment.pool_line(Pool(deployment, budget).blocks, longest)
        logger.info("kvroute plan, %g of this device's memory: %s", budget.utilization, planned)


def deployment_of(config: EngineConfig) -> Deployment:
    """Return the deployment that an engine's settings describe, or raise a ModelError."""
    is_tiny = config.model == TINY_MODEL
    model = TINY_CONFIG if is_tiny else read_config(Path(config.model) / "config.json")
    return Deployment.of(
        model,
        config.dtype,
        config.kv_cache_dtype,
        tensor_parallel=config.tensor_parallel_size,
        block_tokens=config.block_tokens,
        chunk_tokens=config.max_num_batched_tokens,
    )
