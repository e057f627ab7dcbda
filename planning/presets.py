"""Preset GPUs and models for planning.

GPU figures are peaks of the vendors' data sheets as of 2026-11: dense 16-bit tensor operations, one direction
of the host link, gigabytes of 10^9 bytes (a board may have a few per cent more memory than its name says,
none has less). Model figures are those of the config.json files on Hugging Face.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from model_server.config import TINY_MODEL
from model_server.errors import ModelError
from model_server.shapes.hf_config import TINY_CONFIG, HfConfig, read_config

_GB = 10**9
_TERA = 1e12
_PCIE_4, _PCIE_5 = 32, 64


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory and peak speeds of a GPU."""

    name: str  # common name
    memory_bytes: int  # size of its memory
    memory_bytes_per_s: float  # memory bandwidth
    flops_per_s: float  # dense 16-bit operations; a multiply-add counts as two
    link_bytes_per_s: float  # bandwidth to or from host memory

    def at(self, efficiency: float) -> "Gpu":
        """Return a GPU that reaches only this share (0..1) of its peak speeds."""
        return replace(
            self,
            memory_bytes_per_s=self.memory_bytes_per_s * efficiency,
            flops_per_s=self.flops_per_s * efficiency,
            link_bytes_per_s=self.link_bytes_per_s * efficiency,
        )


def _gpu(name: str, gb: int, gb_per_s: int, tflops: float, link_gb_per_s: int) -> Gpu:
    return Gpu(name, gb * _GB, float(gb_per_s * _GB), tflops * _TERA, float(link_gb_per_s * _GB))


GPUS: dict[str, Gpu] = {
    "a10": _gpu("A10", 24, 600, 125, _PCIE_4),
    "a100": _gpu("A100 80GB SXM", 80, 2039, 312, _PCIE_4),
    "a100-40gb": _gpu("A100 40GB SXM", 40, 1555, 312, _PCIE_4),
    "b200": _gpu("B200", 180, 8000, 2250, _PCIE_5),
    "h100": _gpu("H100 SXM", 80, 3350, 989, _PCIE_5),
    "h100-pcie": _gpu("H100 PCIe", 80, 2000, 756, _PCIE_5),
    "h200": _gpu("H200 SXM", 141, 4800, 989, _PCIE_5),
    "l4": _gpu("L4", 24, 300, 121, _PCIE_4),
    "l40s": _gpu("L40S", 48, 864, 362, _PCIE_4),
    "mi300x": _gpu("MI300X", 192, 5300, 1307, _PCIE_5),
    "rtx4090": _gpu("RTX 4090", 24, 1008, 165, _PCIE_4),
}

# GPU described by flags, with the host link of current machines.
CUSTOM = _gpu("custom", 0, 0, 0, _PCIE_5)


_TIED: dict[str, object] = {"tie_word_embeddings": True}
_UNTIED: dict[str, object] = {"tie_word_embeddings": False}
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
# Name, family, sizes in the order of _SIZES, and differences from the family.
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
    """Return the configuration of a checkpoint directory or a preset; raises a ModelError for other names."""
    directory = Path(name)
    if directory.is_dir():
        return read_config(directory / "config.json")
    if name.lower() not in PRESETS:
        raise ModelError(f"{name}: neither a model directory nor one of {', '.join(PRESETS)}")
    return PRESETS[name.lower()]


def _preset(name: str, family: str, sizes: tuple[int, ...], fields: dict[str, object]) -> HfConfig:
    common = {"architectures": [f"{family}ForCausalLM"], "dtype": "bfloat16"}
    return HfConfig({**common, **_FAMILIES[family], **dict(zip(_SIZES, sizes, strict=True)), **fields}, name)


PRESETS = {model[0].lower(): _preset(*model) for model in _MODELS} | {TINY_MODEL: TINY_CONFIG}
