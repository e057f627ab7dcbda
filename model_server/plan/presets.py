"""Models by name, for planning without a checkpoint at hand.

In: a preset's name or a checkpoint directory. Out: what config.json says of it. The numbers of the presets
are those of the models' own config.json files on Hugging Face.
"""

from pathlib import Path

from model_server.config import TINY_MODEL
from model_server.errors import ModelError
from model_server.shapes import TINY_CONFIG, HfConfig, read_config

_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_FAMILIES: dict[str, dict[str, object]] = {
    "Gemma3": {"vocab_size": 262_144, "head_dim": 256, "sliding_window": 512},
    "Llama": {"vocab_size": 128_256, "head_dim": 128, "max_position_embeddings": 131_072, **_UNTIED},
    "Mistral": {"vocab_size": 32_768, "max_position_embeddings": 32_768},
    "Qwen2": {"vocab_size": 152_064, "max_position_embeddings": 32_768, **_UNTIED},
    "Qwen3": {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960, **_UNTIED},
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# Name, family, sizes in the order of _SIZES, and what else differs from the family.
_MODELS: tuple[tuple[str, str, tuple[int, ...], dict[str, object]], ...] = (
    ("Gemma-3-1B", "Gemma3", (1152, 6912, 26, 4, 1), {"max_position_embeddings": 32_768}),
    ("Llama-3.2-1B", "Llama", (2048, 8192, 16, 32, 8), {"head_dim": 64, **_TIED}),
    ("Llama-3.2-3B", "Llama", (3072, 8192, 28, 24, 8), _TIED),
    ("Llama-3.1-8B", "Llama", (4096, 14_336, 32, 32, 8), {}),
    ("Llama-3.3-70B", "Llama", (8192, 28_672, 80, 64, 8), {}),
    ("Mistral-7B-v0.3", "Mistral", (4096, 14_336, 32, 32, 8), {}),
    ("Qwen2.5-0.5B", "Qwen2", (896, 4864, 24, 14, 2), {"vocab_size": 151_936, **_TIED}),
    ("Qwen2.5-7B", "Qwen2", (3584, 18_944, 28, 28, 4), {}),
    ("Qwen2.5-72B", "Qwen2", (8192, 29_568, 80, 64, 8), {}),
    ("Qwen3-0.6B", "Qwen3", (1024, 3072, 28, 16, 8), _TIED),
    ("Qwen3-4B", "Qwen3", (2560, 9728, 36, 32, 8), _TIED),
    ("Qwen3-8B", "Qwen3", (4096, 12_288, 36, 32, 8), {}),
    ("Qwen3-14B", "Qwen3", (5120, 17_408, 40, 40, 8), {}),
    ("Qwen3-32B", "Qwen3", (5120, 25_600, 64, 64, 8), {}),
)


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


def _preset(name: str, family: str, sizes: tuple[int, ...], fields: dict[str, object]) -> HfConfig:
    common = {"architectures": [f"{family}ForCausalLM"], "dtype": "bfloat16"}
    return HfConfig({**common, **_FAMILIES[family], **dict(zip(_SIZES, sizes, strict=True)), **fields}, name)


PRESETS = {name.lower(): _preset(name, *rest) for name, *rest in _MODELS} | {TINY_MODEL: TINY_CONFIG}
