"""Division of a model among tensor parallel ranks: nothing is missing or computed twice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from model_server.errors import ConfigError
from model_server.model import weights
from model_server.model.decoder import Decoder, Weight
from model_server.model.ranks import Ranks
from model_server.model.weights import load_adapter, load_checkpoint, load_tiny
from model_server.shapes.architectures import decoder_shape
from model_server.shapes.hf_config import TINY_CONFIG
from model_server.shapes.shape import DecoderShape, ModelRank, check_divisible
from tests.support.model_server.lora import save_adapter
from tests.support.model_server.model import CPU, save_reference

TINY = decoder_shape(TINY_CONFIG)


def divided(shape: DecoderShape, size: int) -> list[ModelRank]:
    """Return all ranks."""
    check_divisible(shape, size)
    return [ModelRank(rank, size) for rank in range(size)]


@given(
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 8),
    width=st.integers(1, 40),
    vocab_size=st.integers(1, 50),
    size=st.integers(1, 16),
)
def test_every_part_belongs_to_one_rank(
    group: int, kv_heads: int, width: int, vocab_size: int, size: int
) -> None:
    """Each query head, MLP column and token belongs to one rank, which has the query head's KV head."""
    shape = replace(
        TINY, heads=group * kv_heads, kv_heads=kv_heads, intermediate=width, vocab_size=vocab_size
    )
    try:
        ranks = divided(shape, size)
    except ConfigError:
        assert shape.heads % size or width % size or (kv_heads % size and size % kv_heads)
        return
    for share_of, whole in (
        (ModelRank.heads, shape.heads),
        (ModelRank.intermediate, width),
        (ModelRank.vocabulary, vocab_size),
    ):
        shards = [share_of(model_rank, shape) for model_rank in ranks]
        assert [index for shard in shards for index in range(whole)[shard.span]] == list(range(whole))
    for model_rank in ranks:
        own, read = model_rank.heads(shape), model_rank.kv_heads(shape)
        part = model_rank.part_of(shape)
        for index in range(part.heads):
            kv_head = read.first + index // (part.heads // part.kv_heads)
            assert kv_head == (own.first + index) // group


@pytest.mark.parametrize(("size", "wrong"), [(3, {}), (16, {}), (2, {"intermediate": 689})])
def test_a_size_that_does_not_divide_is_rejected(size: int, wrong: dict[str, int]) -> None:
    """The error names the model's dimensions and the valid sizes."""
    good = "1" if wrong else "1, 2, 4, 8"
    with pytest.raises(
        ConfigError, match=rf"size is {size}, .* 8 query heads, 2 KV heads .* use one of {good}$"
    ):
        check_divisible(replace(TINY, **wrong), size)  # type: ignore[arg-type]


def together(parts: list[Weight]) -> torch.Tensor:
    """Assemble the tensor from the ranks' parts; overlapping parts must be equal."""
    whole = torch.full(parts[0].shape, torch.nan)
    for part in parts:
        place = whole[tuple(shard.span for shard in part.shards)]
        assert place.shape == part.tensor.shape
        assert bool((place.isnan() | (place == part.tensor)).all())
        place.copy_(part.tensor)
    assert not whole.isnan().any(), "a part of a weight is nobody's"
    return whole


@pytest.mark.parametrize(
    ("architecture", "changes", "size"),
    [
        ("llama", {"attention_bias": True}, 2),
        ("qwen2", {"num_key_value_heads": 1}, 4),
        ("gemma3", {"tie_word_embeddings": True, "head_dim": 10}, 2),
    ],
)
def test_the_ranks_weights_are_the_checkpoints(
    tmp_path: Path, architecture: str, changes: dict[str, object], size: int
) -> None:
    """The ranks' parts, assembled, equal the tensors of the checkpoint."""
    save_reference(tmp_path, architecture, **changes)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = [
        load_checkpoint(tmp_path, "auto", CPU, Ranks(ModelRank(rank, size))).model.weights()
        for rank in range(size)
    ]
    assert loaded[0].keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(together([rank[name] for rank in loaded]), tensor), name


def test_only_the_ranks_slices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads only its own slice of a divided tensor."""
    save_reference(tmp_path)
    whole: list[str] = []

    class Recorded:
        """Open file that records which tensors were read whole."""

        def __init__(self, *args: object, **options: object) -> None:
            self._file = safe_open(*args, **options)

        def __enter__(self) -> "Recorded":
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            whole.append(name)
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor

    monkeypatch.setattr(weights, "safe_open", Recorded)
    load_checkpoint(tmp_path, "auto", CPU, Ranks(ModelRank(1, 2)))
    assert len(whole) == 2 * 3 + 1
    assert all("norm" in name for name in whole)


def test_the_tiny_model_is_divided_like_a_checkpoint() -> None:
    """The tiny model's random weights do not depend on the number of ranks."""
    alone = load_tiny("auto", CPU).model.weights()
    ranks = [load_tiny("auto", CPU, Ranks(ModelRank(rank, 4))).model.weights() for rank in range(4)]
    for name, weight in alone.items():
        assert torch.equal(together([rank[name] for rank in ranks]), weight.tensor), name


def test_a_rank_keeps_its_part_of_an_adapter(tmp_path: Path) -> None:
    """The ranks' adapter changes are parts of the whole change, or sum up to it."""
    base = save_reference(tmp_path / "base")
    directory = save_adapter(tmp_path / "adapter", base)
    models = [
        load_checkpoint(tmp_path / "base", "auto", CPU, Ranks(ModelRank(rank, 2))).model for rank in range(2)
    ]
    alone = load_checkpoint(tmp_path / "base", "auto", CPU).model
    for name, part in alone.projection_parts.items():
        wanted = change(alone, directory, name)
        assert wanted.shape == (part.rows.whole, part.inputs.whole)
        got = [
            Weight(change(model, directory, name), (own.rows, own.inputs))
            for model in models
            for own in [model.projection_parts[name]]
        ]
        torch.testing.assert_close(together(got), wanted)


def change(model: Decoder, directory: Path, name: str) -> torch.Tensor:
    """Return the change of a projection's weight by an adapter in layer 1, on this rank."""
    part = model.projection_parts[name]
    factors = load_adapter(directory, model).factors[1, part.projection]
    return (factors.up @ factors.down)[part.first_row : part.first_row + part.rows.count]
