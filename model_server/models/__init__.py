"""The decoder architectures that the engine can run, by the name that config.json gives them.

A new architecture joins by a file beside `llama` and a line in `ARCHITECTURES`.
"""

from typing import Protocol

import torch
from torch import Tensor

from model_server.attention import AttentionMeta, SdpaAttention
from model_server.models.hf_config import HfConfig
from model_server.models.llama import LlamaModel, LlamaShape


class DecoderModel(Protocol):
    """What the engine asks of a model; see `LlamaModel` for the meaning of each."""

    shape: LlamaShape
    dtype: torch.dtype
    device: torch.device

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights under their checkpoint names."""

    def forward(
        self, token_ids: Tensor, rows: Tensor, attention: SdpaAttention, meta: AttentionMeta
    ) -> Tensor:
        """Return the logits of the chosen rows of one step."""


# Mistral without its sliding window is Llama; with one, LlamaModel refuses it.
ARCHITECTURES: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
}

__all__ = ["ARCHITECTURES", "DecoderModel", "HfConfig"]
