"""The embedded default model: a small Llama with random weights, the same in every process.

Its text means nothing, but it is a whole model: it depends on every token of its context, so a wrong or
stale KV block shows in what it writes. It speaks the vocabulary of the packaged tiny tokenizer.
"""

import math

import torch

from model_server.config import TINY_MODEL, DType
from model_server.models import HfConfig
from model_server.weights import LoadedModel, eos_token_ids, new_model
from tokenization import TINY_DIRECTORY

_CONFIG: dict[str, object] = {
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
}
_SEED = 20260


def load_tiny(dtype: DType, device: torch.device) -> LoadedModel:
    """Make the model.

    Args:
        dtype: What to compute in; "auto" is float32.
        device: Where the weights go.
    """
    model = new_model(HfConfig(_CONFIG, TINY_MODEL), dtype, device)
    generator = torch.Generator().manual_seed(_SEED)
    for name, tensor in model.tensors().items():
        if tensor.dim() == 1:
            tensor.fill_(1.0)  # norms
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * _scale(name, tensor.shape[1]))
    ends = eos_token_ids(TINY_DIRECTORY)
    # Logits of 0 are never the best of thousands: greedy answers have the length that was asked for.
    model.tensors()["lm_head.weight"][sorted(ends)] = 0.0
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
