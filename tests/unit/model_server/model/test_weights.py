"""Loading of checkpoints, whole or sharded, and errors for those that do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_server.errors import ConfigError, ModelError
from model_server.model.weights import load_checkpoint, new_model, torch_device
from model_server.shapes.hf_config import HfConfig

CPU = torch.device("cpu")
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "eos_token_id": 5,
}
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid checkpoint."""
    directory = tmp_path_factory.mktemp("checkpoint")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = new_model(HfConfig(CONFIG, "test"), "auto", CPU).weights()
    tensors = {name: torch.randn(place.shape, generator=generator) for name, place in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy of the valid checkpoint, to be modified."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def change_config(directory: Path, **changes: object) -> None:
    """Overwrite fields of config.json."""
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path) -> dict[str, str]:
    """Split model.safetensors in two; return the index's weight_map."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    (directory / "model.safetensors").unlink()
    weight_map = {name: file for file, members in files.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_every_tensor_finds_its_place_in_the_chosen_dtype(original: Path) -> None:
    """All weights load in the dtype of config.json or of the caller."""
    stored = load_file(original / "model.safetensors")
    for dtype, wanted in (("auto", torch.bfloat16), ("float32", torch.float32)):
        places = load_checkpoint(original, dtype, CPU).model.weights()  # type: ignore[arg-type]
        assert places.keys() == stored.keys()
        for name, place in places.items():
            assert torch.equal(place.tensor, stored[name].to(wanted)), name


def test_shards_are_read_as_one(original: Path, checkpoint: Path) -> None:
    """A sharded checkpoint gives the same model as a whole one."""
    shard(checkpoint)
    whole, sharded = (load_checkpoint(path, "auto", CPU).model.weights() for path in (original, checkpoint))
    assert all(torch.equal(whole[name].tensor, sharded[name].tensor) for name in whole)


def test_end_of_sequence_comes_from_the_generation_config_first(checkpoint: Path) -> None:
    """generation_config.json takes precedence over config.json; it has one id or several."""
    assert load_checkpoint(checkpoint, "auto", CPU).eos_token_ids == {5}
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    loaded = load_checkpoint(checkpoint, "auto", CPU)
    assert (loaded.eos_token_ids, loaded.model.shape.max_positions) == ({3, 4}, 64)


def test_redundant_tensors_are_passed_over(checkpoint: Path) -> None:
    """A tied model's head and old rotary frequencies are ignored."""
    change_config(checkpoint, tie_word_embeddings=True)
    change_tensors(
        checkpoint,
        lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}),
    )
    load_checkpoint(checkpoint, "auto", CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "a list of strings"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "big"}, "'hidden_size' is 'big'; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "divisor of the 2 attention heads"),
        ({"head_dim": 3}, "head_dim.*even"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "lacks 8 tensors.*self_attn.k_proj.bias"),
        ({"num_hidden_layers": 10**9}, "at most 1024"),
        ({"vocab_size": 10**17}, "config.json: not enough memory on cpu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'quantization_config' is 'gptq'.*quantized"),
        ({"quantization_config": 4}, "'quantization_config' is 4; it must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling: field 'rope_type' is 'dynamic'.*yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: field 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' is 0; it must be a positive number"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor.*above low_freq_factor",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 4}, "lacks 4 tensors.*self_attn.k_norm.weight"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types.*2 times",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layer_types.*2 times",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "only causal"),
        ({"rope_scaling": {"type": "llama3"}}, "rope_scaling: field 'factor' is missing"),
        ({"rope_parameters": 5}, "'rope_parameters' is 5; it must be an object"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "true or false"),
        ({"dtype": "int8"}, "'dtype' is 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"vocab_size": 21}, r"has shape \(20, 8\); config.json requires \(21, 8\)"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..* is not part of the model"),
        ({"num_hidden_layers": 3}, "lacks 9 tensors.*model.layers.2.input_layernorm.weight.*, ..."),
    ],
)
def test_a_config_that_cannot_be_used_is_explained(
    checkpoint: Path, changes: dict[str, object], message: str
) -> None:
    """The error names the invalid field or tensor and the expected value."""
    change_config(checkpoint, **changes)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(checkpoint, "auto", CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"lacks 1 tensors.*: {NORM}$"),
        (
            lambda tensors: tensors.update({"extra": torch.ones(1)}),
            "model.safetensors: tensor 'extra' is not part of the model",
        ),
        (
            lambda tensors: tensors.update({DOWN: torch.ones(12, 8)}),
            r"\(12, 8\); config.json requires \(8, 12\)",
        ),
        (lambda tensors: tensors.update({NORM: torch.ones(8, dtype=torch.int8)}), "is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_explained(
    checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """The error names the file, the tensor and the expected shape."""
    change_tensors(checkpoint, change)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(checkpoint, "auto", CPU)


def test_files_that_cannot_be_read_are_explained(checkpoint: Path) -> None:
    """Missing, damaged and foreign files are named; an index cannot refer outside its directory."""
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read as safetensors"):
        load_checkpoint(checkpoint, "auto", CPU)
    weights.unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_checkpoint(checkpoint, "auto", CPU)
    index = checkpoint / "model.safetensors.index.json"
    for names, message in (
        ({NORM: "../model.safetensors"}, "only files beside it"),
        ({NORM: 3}, "must be a str"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ModelError, match=message):
            load_checkpoint(checkpoint, "auto", CPU)
    for content, message in (("[]", "expected a JSON object, got list"), ("{", "cannot be read as JSON")):
        (checkpoint / "config.json").write_text(content)
        with pytest.raises(ModelError, match=message):
            load_checkpoint(checkpoint, "auto", CPU)
    with pytest.raises(ModelError, match="no such model directory"):
        load_checkpoint(checkpoint / "nowhere", "auto", CPU)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    """A shard listed in the index but missing on disk is named."""
    shard(checkpoint)
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2.safetensors: cannot be read"):
        load_checkpoint(checkpoint, "auto", CPU)


@pytest.mark.parametrize("name", ["cuda:99", "warp drive"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    """An unavailable device is rejected by name."""
    with pytest.raises(ConfigError, match=name):
        torch_device(name)
