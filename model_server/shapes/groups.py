"""KV cache groups: layers that keep the same part of a sequence and so can share one block table.

In: the attention window of each layer. Out: the groups. It knows neither tensors nor requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

KvGroupKind = Literal["full_attention", "sliding_window"]

# Groups as long as the longest one where that pads the others by less than this share; as vLLM groups.
_PADDING_MAX = 0.25


@dataclass(frozen=True, slots=True)
class KvGroupSpec:
    """Layers that read one block table.

    A block holds the KV of one group only: the n-th layer of every group lies in the n-th plane of the pool,
    so all groups draw blocks from one pool and a block is as large as the longest group.

    Attributes:
        kind: As KV events name it.
        window_tokens: A token attends to itself and the `window_tokens - 1` before it; None is all.
            Whatever lies further back is never read again: its block may be freed, and its entry in the
            table may then be any valid block.
        layers: Indices of the layers, rising.
    """

    kind: KvGroupKind
    window_tokens: int | None
    layers: tuple[int, ...]


def kv_groups(windows: Sequence[int | None]) -> tuple[KvGroupSpec, ...]:
    """Divide a model's layers into groups of about equal length, each with one window.

    Args:
        windows: The attention window of each layer in tokens, None for full attention.

    Returns:
        The groups in the order of their first layers; a model of one kind has one.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    lengths = [len(layers) for layers in layers_of.values()]
    length = max(lengths) if max(lengths) < (1 + _PADDING_MAX) * min(lengths) else min(lengths)
    groups = [
        _group(window, layers[start : start + length])
        for window, layers in layers_of.items()
        for start in range(0, len(layers), length)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers))


def pool_groups(windows: Sequence[int | None]) -> tuple[KvGroupSpec, ...]:
    """Return the groups that the engine keeps for a model, by the attention window of each layer.

    A model of windows alone keeps everything: where prompts part is told by full attention only, and readers
    of the events can place blocks of a window by those of full attention only.
    """
    groups = kv_groups(windows)
    return groups if any(group.window_tokens is None for group in groups) else undivided(len(windows))


def undivided(num_layers: int) -> tuple[KvGroupSpec, ...]:
    """Return one group of all layers: every layer keeps the whole sequence, whatever its window."""
    return (_group(None, range(num_layers)),)


def _group(window: int | None, layers: Sequence[int]) -> KvGroupSpec:
    return KvGroupSpec("full_attention" if window is None else "sliding_window", window, tuple(layers))
