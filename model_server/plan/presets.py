"""Models by name, for planning without a checkpoint at hand.

In: a preset's name or a checkpoint directory. Out: what config.json says of it. The numbers of the presets
are those of the models' own config.json files on Hugging Face.
"""

from pathlib import Path
from typing import TypeAlias

from model_server.config import TINY_MODEL
from model_server.errors import ModelError
from model_server.shapes import TINY_CONFIG, HfConfig, read_config

# Hidden width, width of the MLP, layers, query heads, KV heads.
_Sizes: TypeAlias = tuple[int, int, int, int, int]


def find_model(name: str) -> HfConfig:
    """Return the configuration of a checkpoint directory, or of a preset, whatever its case.

    Raises:
        ModelError: It is neither, or its config.json cannot be read.
    """
    directory = Path(name)
    if directory.is_dir():
        return read_config(directory / "config.json")
    if name.lower() not in PRESETS:
        raise ModelError(f"{name}: neither a model directory nor one of {', '.join(PRESETS)}")
    return PRESETS[name.lower()]


def _model(name: str, architecture: str, sizes: _Sizes, **fields: object) -> tuple[str, HfConfig]:
    hidden, intermediate, layers, heads, kv_heads = sizes
    values = {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": "bfloat16",
        **fields,
    }
    return name.lower(), HfConfig(values, name)


def _qwen2(name: str, sizes: _Sizes, *, vocab: int = 152_064, tied: bool = False) -> tuple[str, HfConfig]:
    return _model(
        name,
        "Qwen2",
        sizes,
        vocab_size=vocab,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
    )


def _qwen3(name: str, sizes: _Sizes, *, tied: bool = False) -> tuple[str, HfConfig]:
    return _model(
        name,
        "Qwen3",
        sizes,
        vocab_size=151_936,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )


def _llama3(name: str, sizes: _Sizes, *, tied: bool = False) -> tuple[str, HfConfig]:
    return _model(
        name,
        "Llama",
        sizes,
        vocab_size=128_256,
        head_dim=128 if sizes[0] > 2048 else 64,
        max_position_embeddings=131_072,
        tie_word_embeddings=tied,
    )


def _gemma3(name: str, sizes: _Sizes, *, head_dim: int, window: int, context: int) -> tuple[str, HfConfig]:
    return _model(
        name,
        "Gemma3",
        sizes,
        vocab_size=262_144,
        head_dim=head_dim,
        sliding_window=window,
        max_position_embeddings=context,
    )


PRESETS: dict[str, HfConfig] = dict(
    [
        _gemma3("Gemma-3-1B", (1152, 6912, 26, 4, 1), head_dim=256, window=512, context=32_768),
        _llama3("Llama-3.2-1B", (2048, 8192, 16, 32, 8), tied=True),
        _llama3("Llama-3.2-3B", (3072, 8192, 28, 24, 8), tied=True),
        _llama3("Llama-3.1-8B", (4096, 14_336, 32, 32, 8)),
        _llama3("Llama-3.3-70B", (8192, 28_672, 80, 64, 8)),
        _model(
            "Mistral-7B-v0.3",
            "Mistral",
            (4096, 14_336, 32, 32, 8),
            vocab_size=32_768,
            max_position_embeddings=32_768,
        ),
        _qwen2("Qwen2.5-0.5B", (896, 4864, 24, 14, 2), vocab=151_936, tied=True),
        _qwen2("Qwen2.5-7B", (3584, 18_944, 28, 28, 4)),
        _qwen2("Qwen2.5-72B", (8192, 29_568, 80, 64, 8)),
        _qwen3("Qwen3-0.6B", (1024, 3072, 28, 16, 8), tied=True),
        _qwen3("Qwen3-4B", (2560, 9728, 36, 32, 8), tied=True),
        _qwen3("Qwen3-8B", (4096, 12_288, 36, 32, 8)),
        _qwen3("Qwen3-14B", (5120, 17_408, 40, 40, 8)),
        _qwen3("Qwen3-32B", (5120, 25_600, 64, 64, 8)),
        (TINY_MODEL, TINY_CONFIG),
    ]
)
