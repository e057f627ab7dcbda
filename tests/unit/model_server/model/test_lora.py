"""LoRA adapters: equal to merged weights, beside the base model, with clear loading errors."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_server.errors import AdapterError, RequestError
from model_server.model.decoder import Decoder
from model_server.model.lora import LoraAdapter, LoraBatch, LoraRegistry
from model_server.model.weights import load_adapter, load_checkpoint
from model_server.requests import LoraRequest
from tests.support.model_server.lora import merged, save_adapter
from tests.support.model_server.model import (
    CPU,
    new_pool,
    reference_logits,
    save_reference,
    span,
    step,
    text_of,
)

WEIGHTS = "adapter_model.safetensors"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_%s.weight"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def rows_of(*parts: tuple[int, LoraAdapter | None], sampled: Sequence[int] | None = None) -> LoraBatch | None:
    """Return the adapter of each row for runs of rows."""
    adapters = [adapter for length, adapter in parts for _ in range(length)]
    return LoraBatch.of(adapters, range(len(adapters)) if sampled is None else sampled, torch.from_numpy)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank": 4},
        {"targets": ["q_proj", "v_proj"]},
        {"targets": ["k_proj", "down_proj"], "layers": [1]},
    ],
    ids=str,
)
def test_an_adapter_equals_its_merged_weights(
    tmp_path: Path, architecture: str, settings: dict[str, object]
) -> None:
    """Chunked and token by token, the logits equal those of merged weights."""
    base = save_reference(tmp_path / "base", architecture)
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    directory = save_adapter(tmp_path / "adapter", base, **settings)  # type: ignore[arg-type]
    adapter = load_adapter(directory, model)
    text, pool = text_of(20), new_pool(model)
    got, start = [], 0
    for length in (9, 1, 1, 9):
        part = (text, span(start, length, list(range(5))))
        got.append(step(model, pool, [part], rows_of((length, adapter))))
        start += length
    want = reference_logits(merged(base, directory), text)
    assert (want - reference_logits(base, text)).abs().max() > 0.1
    torch.testing.assert_close(torch.cat(got), want, atol=1e-3, rtol=1e-4)


def test_adapters_and_the_base_model_share_a_step(tmp_path: Path) -> None:
    """In one step with two adapters, every sequence gets the logits that it gets alone."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    directories = [save_adapter(tmp_path / str(rank), base, seed=rank, rank=rank) for rank in (2, 5)]
    small, large = (load_adapter(path, model) for path in directories)
    users = [small, None, large, None, small]
    spans = [(7, 1), (7, 1), (7, 1), (0, 11), (4, 8)]
    pool, texts = new_pool(model), [text_of(start + length, 1) for start, length in spans]
    tables = [list(range(3 * index, 3 * index + 3)) for index in range(len(users))]
    for text, (start, _), table, user in zip(texts, spans, tables, users, strict=True):
        if start:
            step(model, pool, [(text, span(0, start, table))], rows_of((start, user)))
    parts = [(text, span(*part, table)) for text, part, table in zip(texts, spans, tables, strict=True)]
    lengths = [length for _, length in spans]
    got = step(model, pool, parts, rows_of(*zip(lengths, users, strict=True))).split(lengths)
    references = {
        None: base,
        small: merged(base, directories[0]),
        large: merged(base, directories[1]),
    }
    for logits, text, user, (start, _) in zip(got, texts, users, spans, strict=True):
        want = reference_logits(references[user], text)[start:]
        torch.testing.assert_close(logits, want, atol=1e-3, rtol=1e-4)


def test_rows_of_the_base_model_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """Rows of the base model are bit-identical when other rows of the step have adapters."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    adapter = load_adapter(save_adapter(tmp_path / "adapter", base), model)
    parts = [(text_of(9, 1), span(0, 9, [0, 1, 2])), (text_of(9, 2), span(0, 9, [3, 4, 5]))]
    alone = step(model, new_pool(model), parts)
    beside = step(model, new_pool(model), parts, rows_of((9, None), (9, adapter)))
    assert torch.equal(alone[:9], beside[:9])
    assert not torch.allclose(alone[9:], beside[9:])


def test_the_last_layer_follows_the_chosen_rows(tmp_path: Path) -> None:
    """If logits of only some rows are computed, each row still uses its own adapter."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    adapter = load_adapter(save_adapter(tmp_path / "adapter", base), model)
    text, flat = text_of(6), torch.tensor(text_of(6) * 2)
    pool = new_pool(model)
    for rows in ([5, 11], [11, 5], [5], [11]):
        lora = rows_of((6, None), (6, adapter), sampled=rows)
        with torch.inference_mode():
            meta = pool.prepare([span(0, 6, [0, 1]), span(0, 6, [2, 3])])
            got = model.forward(flat, torch.tensor(rows), pool, meta, lora)
        for row, logits in zip(rows, got, strict=True):
            reference = base if row == 5 else merged(base, tmp_path / "adapter")
            torch.testing.assert_close(logits, reference_logits(reference, text)[5], atol=1e-3, rtol=1e-4)


def test_steps_without_adapters_carry_nothing() -> None:
    """A step without adapters has no adapter batch."""
    assert rows_of((3, None)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "'use_dora' is True"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
        ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern'"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"peft_type": "LOHA"}, "'peft_type' is 'LOHA'"),
        ({"r": 0}, "'r' is 0; it must be a positive integer"),
        ({"r": 513}, "'r' is 513; it must be at most 512"),
        ({"r": 4}, r"lora_A.weight' has shape \(3, \d+\); .* requires \(4, \d+\)"),
        ({"lora_alpha": "much"}, "'lora_alpha' is 'much'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "no tensor for target module 'lm_head'"),
        ({"target_modules": 3}, "target_modules"),
    ],
)
def test_a_config_that_cannot_be_used_is_explained(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """An unsupported setting is rejected by the name of its field."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    directory = save_adapter(tmp_path / "adapter", base, **changes)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=message):
        load_adapter(directory, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(Q_PROJ % "B"), "layer 0 has no lora_B for self_attn.q_proj"),
        (lambda tensors: tensors.pop(Q_PROJ % "A"), "layer 0 has no lora_A for self_attn.q_proj"),
        (lambda tensors: tensors.clear(), "contains no tensors"),
        (
            lambda tensors: tensors.update({Q_PROJ.replace(".0.", ".3.") % "A": torch.ones(3, 32)}),
            r"layers\.3\.self_attn.* is not supported; .* of the model's 3 layers",
        ),
        (
            lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 32)}),
            "'base_model.model.lm_head.lora_A.weight' is not supported; adapters can change self_attn.q_proj",
        ),
        (
            lambda tensors: tensors.update({Q_PROJ % "B": torch.ones((32, 3), dtype=torch.int8)}),
            "lora_B.weight' is stored as I8",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_explained(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    """The error names the file, the tensor and the expected shape."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    directory = save_adapter(tmp_path / "adapter", base)
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(AdapterError, match=message):
        load_adapter(directory, model)


def test_files_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    """Errors name missing and damaged files."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    with pytest.raises(AdapterError, match=r"nowhere/adapter_config.json: the file is missing"):
        load_adapter(tmp_path / "nowhere", model)
    weights = save_adapter(tmp_path / "adapter", base) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors: cannot be read as safetensors"):
        load_adapter(tmp_path / "adapter", model)
    weights.unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors: cannot be read as safetensors"):
        load_adapter(tmp_path / "adapter", model)


def loaded(model: Decoder, directory: Path, name: str, lora_id: int) -> LoraRequest:
    """Load an adapter as the executor does."""
    return LoraRequest(name, lora_id, load_adapter(directory, model).content_hash)


def test_the_registry_is_bounded(tmp_path: Path) -> None:
    """The limit of loaded adapters holds under concurrent loads; unloading makes room."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    registry = LoraRegistry(partial(loaded, model), max_loras=2)
    directory = save_adapter(tmp_path / "adapter", base)
    refused: list[str] = []

    def load(name: str) -> None:
        try:
            registry.load(name, directory)
        except AdapterError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=load, args=(name,)) for name in "abcde"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.loaded()) == 2
    assert refused == ["2 adapters are loaded and max_loras is 2; unload one first"] * 3
    registry.unload(next(iter(registry.loaded())))
    registry.load("f", directory)
    assert [*registry.loaded()][-1] == "f"


def test_names_are_checked(tmp_path: Path) -> None:
    """A taken, unknown, empty or unprintable name is rejected; adapter ids are never reused."""
    base = save_reference(tmp_path / "base")
    model = load_checkpoint(tmp_path / "base", "auto", CPU).model
    registry = LoraRegistry(partial(loaded, model), max_loras=2)
    directory = save_adapter(tmp_path / "adapter", base)
    first = registry.load("sql", directory)
    with pytest.raises(AdapterError, match="'sql' is loaded already"):
        registry.load("sql", directory)
    for name in ("", "a\nb", "x" * 257):
        with pytest.raises(AdapterError, match="printable"):
            registry.load(name, directory)
    with pytest.raises(AdapterError, match="no adapter 'other'"):
        registry.unload("other")
    registry.unload("sql")
    with pytest.raises(RequestError, match="no adapter 'sql'"):
        registry.find("sql")
    again = registry.load("sql", directory)
    assert again.lora_id > first.lora_id
    assert again.content_hash == first.content_hash
    changed = save_adapter(tmp_path / "changed", base, seed=1)
    assert registry.load("other", changed).content_hash != first.content_hash
