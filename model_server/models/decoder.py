"""The decoder that all architectures share: attention with rotary positions, RMS norms, gated MLP.

In: a flat batch of token ids with its attention metadata. Out: logits of the chosen rows. It owns the
weights, names them as Hugging Face checkpoints do, and knows neither requests nor blocks.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention import Attention, KvGroupSpec, StepMeta, kv_groups
from model_server.lora import LoraBatch
from model_server.models.layer import DecoderLayer, ProjectionPart
from model_server.models.rope import Rope, rotate, rotation
from model_server.models.shape import DecoderShape

_ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


class Decoder:
    """A decoder whose weights are yet to be written into `tensors()`.

    Attributes:
        shape: What it computes.
        dtype: Of weights and activations.
        device: Where the weights are.
    """

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._embedding = torch.empty((shape.vocab_size, shape.hidden), dtype=dtype, device=device)
        self._head = self._embedding if shape.tied_embeddings else torch.empty_like(self._embedding)
        self._norm = torch.empty(shape.hidden, dtype=dtype, device=device)
        self._layers = [DecoderLayer(shape, dtype, device) for _ in range(shape.layers)]
        self._frequencies = {rope: rope.frequencies(shape.head_dim).to(device) for rope in set(shape.ropes)}
        self._embedding_scale = torch.tensor(shape.embedding_scale, dtype=dtype).item()
        self._activation = _ACTIVATIONS[shape.activation]

    @property
    def kv_groups(self) -> tuple[KvGroupSpec, ...]:
        """The groups of layers that can share a block table."""
        return kv_groups(self.shape.windows)

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights under their checkpoint names; write into them to load the model."""
        named = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not self.shape.tied_embeddings:
            named["lm_head.weight"] = self._head
        for index, layer in enumerate(self._layers):
            named |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return named

    def projection_parts(self) -> dict[str, ProjectionPart]:
        """Return each layer's projections (what adapters can change) by their checkpoint names."""
        return DecoderLayer.parts(self.shape)

    def forward(
        self,
        token_ids: Tensor,
        rows: Tensor,
        attention: Attention,
        meta: StepMeta,
        lora: LoraBatch | None = None,
    ) -> Tensor:
        """Run the model over one step.

        Args:
            token_ids: int64 [tokens], all sequences one after the other.
            rows: int64, the tokens whose next one is wanted.
            attention: The KV pool.
            meta: Of this step.
            lora: The rows that adapters change.

        Returns:
            float32 logits [rows, vocab_size].
        """
        turns = {
            rope: rotation(meta.positions, frequencies, rope.magnitude, self.dtype)
            for rope, frequencies in self._frequencies.items()
        }
        hidden = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for index in range(len(self._layers)):
            attended = self._attend(hidden, index, turns, attention, meta, lora)
            if index == len(self._layers) - 1:  # nothing reads the other rows any more
                hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
                lora = None if lora is None else lora.chosen(rows)
            hidden = hidden + self._attention_output(attended, index, lora)
            hidden = hidden + self._mlp(hidden, index, lora)
        return functional.linear(self._rms_norm(hidden, self._norm), self._head).float()

    def _attend(
        self,
        hidden: Tensor,
        index: int,
        turns: dict[Rope, tuple[Tensor, Tensor]],
        attention: Attention,
        meta: StepMeta,
        lora: LoraBatch | None,
    ) -> Tensor:
        """Return what a layer's heads have read, [tokens, heads * head_dim]."""
        layer, shape = self._layers[index], self.shape
        heads, both = shape.heads, shape.heads + shape.kv_heads
        projected = self._project(self._rms_norm(hidden, layer.input_norm), index, "qkv", lora)
        projected = projected.view(hidden.shape[0], -1, shape.head_dim)
        rotated = projected[:, :both]
        if shape.head_norms:
            query = self._rms_norm(rotated[:, :heads], layer.query_norm)
            rotated = torch.cat((query, self._rms_norm(rotated[:, heads:], layer.key_norm)), dim=1)
        rotated = rotate(rotated, *turns[shape.ropes[index]])
        attention.store(index, rotated[:, heads:], projected[:, both:], meta)
        return attention.attend(rotated[:, :heads], index, meta)

    def _attention_output(self, attended: Tensor, index: int, lora: LoraBatch | None) -> Tensor:
        """Return what a layer's attention adds to the residual stream."""
        added = self._project(attended, index, "output", lora)
        if self.shape.output_norms:
            added = self._rms_norm(added, self._layers[index].attention_norm)
        return added

    def _mlp(self, hidden: Tensor, index: int, lora: LoraBatch | None) -> Tensor:
        """Return what a layer's MLP adds to the residual stream."""
        layer = self._layers[index]
        gate_up = self._project(self._rms_norm(hidden, layer.mlp_input_norm), index, "gate_up", lora)
        gate, up = gate_up.chunk(2, dim=-1)
        added = self._project(self._activation(gate) * up, index, "down", lora)
        return self._rms_norm(added, layer.mlp_norm) if self.shape.output_norms else added

    def _project(self, inputs: Tensor, index: int, name: str, lora: LoraBatch | None) -> Tensor:
        weight, bias = self._layers[index].projections[name]
        output = functional.linear(inputs, weight, bias)
        if lora is not None:
            lora.add(output, inputs, index, name)
        return output

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        shape = self.shape
        if not shape.norm_offset:
            return functional.rms_norm(hidden, weight.shape, weight, shape.norm_epsilon)
        # In float32: small weights would be lost beside the offset.
        weight = weight.float() + shape.norm_offset
        return functional.rms_norm(hidden.float(), weight.shape, weight, shape.norm_epsilon).to(self.dtype)
