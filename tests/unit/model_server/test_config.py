"""Validation of the engine's settings."""

import pytest

from model_server.config import EngineConfig
from model_server.errors import ConfigError


def test_defaults_are_usable() -> None:
    """The default settings run the tiny model on the CPU with blocks of 16 tokens."""
    config = EngineConfig()
    assert (config.model, config.device, config.block_tokens) == ("kvroute-tiny", "cpu", 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int4"},
        {"kv_cache_dtype": "fp4"},
        {"max_loras": -1},
        {"block_tokens": 0},
        {"gpu_blocks": -1},
        {"max_num_seqs": 0},
        {"max_waiting": 0},
        {"max_model_len": 0},
        {"torch_threads": 0},
        {"max_num_seqs": 9, "max_num_batched_tokens": 8},
    ],
    ids=str,
)
def test_settings_out_of_range_are_rejected(changes: dict[str, int]) -> None:
    """A setting out of range is rejected by name."""
    with pytest.raises(ConfigError, match=next(iter(changes))):
        EngineConfig(**changes)  # type: ignore[arg-type]
