"""Supported decoder architectures, by their name in config.json.

To add an architecture, write a function that returns its `DecoderShape` and list it in `ARCHITECTURES`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from model_server.shapes.hf_config import HfConfig
from model_server.shapes.shape import Activation, DecoderShape, Llama3Scaling, Rope, YarnScaling

_LAYERS_MAX = 1024
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA_PATTERN = 6
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def decoder_shape(config: HfConfig) -> DecoderShape:
    """Return the shape that a config.json describes; raises a ModelError for unsupported features."""
    if config.has("quantization_config"):
        method = config.section("quantization_config").text("quant_method", "an unnamed method")
        raise config.error(
            "quantization_config", method, "absent: quantized checkpoints are not supported, use the original"
        )
    for architecture in config.names("architectures"):
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture](config)
    raise config.error(
        "architectures", config.names("architectures"), f"one of {', '.join(sorted(ARCHITECTURES))}"
    )


def _llama(config: HfConfig) -> DecoderShape:
    return _biased(_base(config, _read_rope(config)), config)


def _mistral(config: HfConfig) -> DecoderShape:
    return _windowed(_base(config, _read_rope(config)), config, default_kind=lambda _: _SLIDING)


def _qwen2(config: HfConfig) -> DecoderShape:
    return replace(_qwen_windows(_base(config, _read_rope(config)), config), qkv_bias=True)


def _qwen3(config: HfConfig) -> DecoderShape:
    shape = _qwen_windows(_base(config, _read_rope(config), default_head_dim=128), config)
    return replace(_biased(shape, config), head_norms=True)


def _gemma3(config: HfConfig) -> DecoderShape:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.has(field):
            raise config.error(field, config.number(field), "null: capped logits are not supported")
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", True, "false: only causal attention is supported")
    local, everywhere = _gemma_ropes(config)
    base = _base(
        config, everywhere, default_head_dim=256, default_activation="gelu_pytorch_tanh", default_tied=True
    )
    pattern = config.integer("sliding_window_pattern", _GEMMA_PATTERN)
    shape = _windowed(base, config, default_kind=lambda layer: _SLIDING if (layer + 1) % pattern else _FULL)
    return replace(
        _biased(shape, config),
        ropes=tuple(everywhere if window is None else local for window in shape.windows),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        head_norms=True,
        output_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(shape.hidden),
    )


ARCHITECTURES: dict[str, Callable[[HfConfig], DecoderShape]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
}


def _base(
    config: HfConfig,
    rope: Rope,
    *,
    default_head_dim: int | None = None,
    default_activation: str = "silu",
    default_tied: bool = False,
) -> DecoderShape:
    """Read the fields that all architectures share (those of Llama)."""
    if config.boolean("mlp_bias", False):
        raise config.error("mlp_bias", True, "false: biases of the MLP are not supported")
    activation = config.text("hidden_activation", config.text("hidden_act", default_activation))
    if activation not in _ACTIVATIONS:
        raise config.error("hidden_act", activation, f"one of {', '.join(_ACTIVATIONS)}")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    head_dim = config.integer("head_dim", default_head_dim or max(hidden // heads, 1))
    if head_dim % 2:
        raise config.error("head_dim", head_dim, "even, for rotary positions")
    layers = config.integer("num_hidden_layers")
    if layers > _LAYERS_MAX:
        raise config.error("num_hidden_layers", layers, f"at most {_LAYERS_MAX}")
    max_positions = config.integer("max_position_embeddings", 2048)
    if isinstance(rope.scaling, YarnScaling):  # config.json may state the length before scaling
        max_positions = max(max_positions, int(rope.scaling.factor * rope.scaling.original_context))
    return DecoderShape(
        vocab_size=config.integer("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.integer("intermediate_size"),
        max_positions=max_positions,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        tied_embeddings=config.boolean("tie_word_embeddings", default_tied),
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        scale=head_dim**-0.5,
        activation=_ACTIVATIONS[activation],
    )


def _biased(shape: DecoderShape, config: HfConfig) -> DecoderShape:
    biased = config.boolean("attention_bias", False)
    return replace(shape, qkv_bias=biased, output_bias=biased)


def _windowed(shape: DecoderShape, config: HfConfig, *, default_kind: Callable[[int], str]) -> DecoderShape:
    """Set the sliding window of each layer, by `layer_types` or, without it, by `default_kind`."""
    if not config.has("sliding_window"):
        return shape
    window = config.integer("sliding_window")
    kinds = config.names("layer_types") or [default_kind(layer) for layer in range(shape.layers)]
    if len(kinds) != shape.layers or not {*kinds} <= {_SLIDING, _FULL}:
        raise config.error("layer_types", kinds, f"{shape.layers} times {_SLIDING!r} or {_FULL!r}")
    return replace(shape, windows=tuple(window if kind == _SLIDING else None for kind in kinds))


def _qwen_windows(shape: DecoderShape, config: HfConfig) -> DecoderShape:
    if not config.boolean("use_sliding_window", False):
        return shape
    whole = config.integer("max_window_layers", 28, minimum=0)
    return _windowed(shape, config, default_kind=lambda layer: _FULL if layer < whole else _SLIDING)


def _gemma_ropes(config: HfConfig) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of sliding-window layers and of full-attention layers."""
    thetas = {
        _SLIDING: config.number("rope_local_base_freq", 10_000.0),
        _FULL: config.number("rope_theta", 1_000_000.0),
    }
    if not config.has("rope_parameters"):
        return Rope(thetas[_SLIDING]), _rope_of(config.section("rope_scaling"), config, thetas[_FULL])
    sections = config.section("rope_parameters")
    local, everywhere = (_rope_of(sections.section(kind), config, theta) for kind, theta in thetas.items())
    return local, everywhere


def _read_rope(config: HfConfig) -> Rope:
    """Read `rope_parameters`, or the older fields `rope_scaling` and `rope_theta`."""
    field = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    return _rope_of(config.section(field), config, config.number("rope_theta", 10_000.0))


def _rope_of(rope: HfConfig, config: HfConfig, theta: float) -> Rope:
    """Read one object of rotary parameters, with defaults from `config`."""
    for section in (rope, config):
        if (share := section.number("partial_rotary_factor", 1.0)) != 1.0:
            raise section.error(
                "partial_rotary_factor", share, "1: partial rotary embeddings are not supported"
            )
    theta = rope.number("rope_theta", theta)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind not in _ROPE_KINDS:
        raise rope.error("rope_type", kind, f"one of {', '.join(_ROPE_KINDS)}")
    factor = rope.number("factor")
    if kind == "linear":
        return Rope(theta, factor)
    # The top-level field (Phi) takes precedence. Without any, the model's context is the original one.
    original_context = config.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", config.integer("max_position_embeddings", 2048)),
    )
    if kind == "yarn":
        return _yarn(rope, theta, factor, original_context)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"above low_freq_factor, {low}")
    return Rope(theta, Llama3Scaling(factor, low, high, original_context))


def _yarn(rope: HfConfig, theta: float, factor: float, original_context: int) -> Rope:
    magnitude = _attention_factor(factor, 1.0)
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        magnitude = _attention_factor(factor, rope.number("mscale")) / _attention_factor(
            factor, rope.number("mscale_all_dim")
        )
    scaling = YarnScaling(
        factor,
        original_context,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )
    return Rope(theta, scaling, rope.number("attention_factor", magnitude))


def _attention_factor(factor: float, weight: float) -> float:
    """Return YaRN's attention factor (arXiv 2309.00071, section 3.4) with DeepSeek's weight."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
