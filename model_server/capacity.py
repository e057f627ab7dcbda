"""Logs the KV pool that an engine really has, in the terms of `kvroute plan`, and on CUDA the plan beside it.

In: a built engine and its settings. Out: log lines. It decides nothing.
"""

import logging

import torch

from model_server.config import EngineConfig
from model_server.engine import Engine
from model_server.plan import Budget, Deployment, Pool, find_model
from model_server.plan.text import pool_line
from model_server.shapes import DTYPE_BYTES, computed_dtype, decoder_shape

logger = logging.getLogger(__name__)


def log_pool(engine: Engine, config: EngineConfig) -> None:
    """Log how much the pool holds."""
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
    deployment = served(config)
    logger.info("KV pool: %s", pool_line(deployment, blocks, longest))
    if device.type == "cuda":
        budget = Budget(torch.cuda.get_device_properties(device).total_memory)
        planned = pool_line(deployment, Pool(deployment, budget).blocks, longest)
        logger.info("kvroute plan, %g of this device's memory: %s", budget.utilization, planned)


def served(config: EngineConfig) -> Deployment:
    """Return the deployment that an engine's settings describe.

    Raises:
        ModelError: The model cannot be found or described.
    """
    model = find_model(config.model)
    return Deployment(
        decoder_shape(model),
        weight_bytes=DTYPE_BYTES[computed_dtype(model, config.dtype)],
        fp8_kv=config.kv_cache_dtype == "fp8",
        tensor_parallel=config.tensor_parallel_size,
        block_tokens=config.block_tokens,
        chunk_tokens=config.max_num_batched_tokens,
    )
