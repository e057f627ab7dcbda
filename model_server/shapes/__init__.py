"""Model dimensions read from a Hugging Face config.json, without torch."""

from model_server.shapes.architectures import ARCHITECTURES, decoder_shape
from model_server.shapes.hf_config import DTYPE_BYTES, TINY_CONFIG, HfConfig, computed_dtype, read_config
from model_server.shapes.shape import (
    AttentionShape,
    DecoderShape,
    KvGroupSpec,
    LinearScaling,
    Llama3Scaling,
    ModelRank,
    Rope,
    Shard,
    YarnScaling,
    blocks_behind,
    blocks_bound,
    check_divisible,
    divides,
    kv_groups,
    pool_groups,
    single_group,
)

__all__ = [
    "ARCHITECTURES",
    "DTYPE_BYTES",
    "TINY_CONFIG",
    "AttentionShape",
    "DecoderShape",
    "HfConfig",
    "KvGroupSpec",
    "LinearScaling",
    "Llama3Scaling",
    "ModelRank",
    "Rope",
    "Shard",
    "YarnScaling",
    "blocks_behind",
    "blocks_bound",
    "check_divisible",
    "computed_dtype",
    "decoder_shape",
    "divides",
    "kv_groups",
    "pool_groups",
    "read_config",
    "single_group",
]
