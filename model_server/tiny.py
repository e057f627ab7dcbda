"""The embedded default model: a small Llama with random weights, the same in every process.

Its text means nothing, but it is a whole model: it depends on every token of its context, so a wrong or
stale KV block shows in what it writes. It speaks the vocabulary of the packaged tiny tokenizer.
"""

import math

import torch

from model_server.config import DType
from model_server.parallel.ranks import Ranks
from model_server.shapes import TINY_CONFIG
from model_server.weights import LoadedModel, eos_token_ids, new_model
from tokenization import TINY_DIRECTORY

_SEED = 20260


def load_tiny(dtype: DType, device: torch.device, ranks: Ranks | None = None) -> LoadedModel:
    """Make the model, or one rank's part of it.

    Args:
        dtype: What to compute in; "auto" is float32.
        device: Where the weights go.
        ranks: Who computes it; None for this process alone.

    Raises:
        ConfigError: There are as many ranks as the model cannot be divided by.
    """
    model = new_model(TINY_CONFIG, dtype, device, ranks)
    ends = eos_token_ids(TINY_DIRECTORY)
    generator = torch.Generator().manual_seed(_SEED)
    for name, weight in model.weights().items():
        if len(weight.shape) == 1:
            weight.tensor.fill_(1.0)  # norms
            continue
        whole = torch.randn(weight.shape, generator=generator) * _scale(name, weight.shape[1])
        if name == "lm_head.weight":
            # Logits of 0 are never the best of thousands: greedy answers have the length that was asked for.
            whole[sorted(ends)] = 0.0
        weight.write(whole)
    return LoadedModel(model, ends, model.shape.max_positions)


def _scale(name: str, inputs: int) -> float:
    """Return the standard deviation of a weight matrix.

    At 1 / sqrt(inputs) all activations keep their size, but random attention is near to an average over the
    context and no token of it matters. Larger query and key weights make it choose, a larger output
    makes the choice felt: one changed token 600 back changes every third token of the answer, while rounding
    stays ten thousand times smaller than the usual distance between the two best tokens.
    """
    if "embed_tokens" in name:
        return 1.0
    gains = {"q_proj": 1.7, "k_proj": 1.7, "o_proj": 2.0}
    return next((gain for part, gain in gains.items() if part in name), 1.0) / math.sqrt(inputs)
