"""The configuration of the built-in model, as its config.json would have it."""

from model_server.config import TINY_MODEL
from model_server.shapes.hf_config import HfConfig

TINY_CONFIG = HfConfig(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 688,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    TINY_MODEL,
)
