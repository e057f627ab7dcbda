"""Image rules by model family, and settings without a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenization.images import FAMILIES, TEXT, files_of, library, write_model
from tokenization import PromptTokenizer, TokenizerLoadError
from tokenization.images.prompts import ImageSize
from tokenization.images.rules import ImageFiles, ImageRule, image_rule

SIZE = ImageSize(100, 60)
# Number of ids of an image of this size.
TOKENS = {"qwen": 4 * 2, "llava": 16, "gemma": 10, "pixtral": 13 * 8, "mistral": 7 * 4}


def rule_of(family: str, files: dict[str, dict[str, Any]]) -> ImageRule | None:
    """Return the rule of these files."""
    names = ("config", "preprocessor_config", "processor_config", "tokenizer_config")
    return image_rule(ImageFiles(*(files.get(name, {}) for name in names)), library(family))


def tokens(rule: ImageRule | None) -> int | None:
    """Return the number of ids of an image."""
    ids = None if rule is None else rule.expand(SIZE)
    return None if ids is None else len(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_directory_has_its_rule(family: str, tmp_path: Path) -> None:
    """A model's directory without weights is enough for its rule."""
    tokenizer = PromptTokenizer.from_directory(write_model(tmp_path, family))
    assert tokens(tokenizer.image_rule) == TOKENS[family]


def test_settings_may_all_be_in_one_file() -> None:
    """Settings of the image processor may be in processor_config.json, as newer transformers write them."""
    files = files_of("qwen")
    image = files.pop("preprocessor_config")
    size = {"shortest_edge": image.pop("min_pixels"), "longest_edge": image.pop("max_pixels")}
    files["processor_config"] = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {**image, "size": size, "image_processor_type": "Qwen2VLImageProcessorPil"},
    }
    assert tokens(rule_of("qwen", files)) == TOKENS["qwen"]
    files["preprocessor_config"] = image
    assert rule_of("qwen", files) is None


QWENS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")


@pytest.mark.parametrize("name", QWENS)
def test_all_of_qwens_releases_have_one_rule(name: str) -> None:
    """All Qwen-VL releases have one rule with the patches and pixels of their files."""
    files = files_of("qwen")
    files["config"]["architectures"] = [f"{name}ForConditionalGeneration"]
    assert tokens(rule_of("qwen", files)) == TOKENS["qwen"]


# A family, a file, and changes that make the rule uncertain.
UNSURE: list[tuple[str, str, dict[str, Any]]] = [
    *((family, "config", {"architectures": ["OtherForConditionalGeneration"]}) for family in FAMILIES),
    *(
        (family, "config", {"architectures": value})
        for family in FAMILIES
        for value in (None, [], "Qwen", [5])
    ),
    *((family, "config", {"vision_config": 5}) for family in ("llava", "pixtral", "mistral")),
    *((family, "preprocessor_config", {"auto_map": {}}) for family in FAMILIES),
    *((family, "preprocessor_config", {"do_resize": False}) for family in FAMILIES),
    *((family, "preprocessor_config", {"processor_class": "OtherProcessor"}) for family in FAMILIES),
    *((family, "preprocessor_config", {"processor_class": []}) for family in FAMILIES),
    *(("qwen", "preprocessor_config", {name: None}) for name in ("patch_size", "merge_size", "max_pixels")),
    ("qwen", "preprocessor_config", {"min_pixels": None}),
    ("qwen", "preprocessor_config", {"min_pixels": 1 << 27}),
    ("qwen", "preprocessor_config", {"max_pixels": 10**30}),
    ("qwen", "preprocessor_config", {"size": {"shortest_edge": 56}}),
    ("qwen", "preprocessor_config", {"size": {"min_pixels": 56}}),
    ("qwen", "preprocessor_config", {"patch_size": 16}),
    ("qwen", "preprocessor_config", {"patch_size": True}),
    ("qwen", "preprocessor_config", {"patch_size": -14}),
    ("qwen", "preprocessor_config", {"image_processor_type": "GlmImageProcessor"}),
    ("qwen", "config", {"image_token_id": 5}),
    ("qwen", "tokenizer_config", {"image_token": "<|other|>"}),
    ("llava", "config", {"image_token_index": None}),
    ("llava", "config", {"image_token_id": 5}),
    ("llava", "config", {"vision_feature_select_strategy": "class"}),
    ("llava", "config", {"vision_config": {"model_type": "dinov2", "image_size": 56, "patch_size": 14}}),
    ("llava", "config", {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}}),
    (
        "llava",
        "config",
        {"vision_config": {"model_type": "clip_vision_model", "image_size": 50, "patch_size": 14}},
    ),
    ("gemma", "preprocessor_config", {"do_pan_and_scan": True}),
    ("gemma", "preprocessor_config", {"image_seq_length": 7}),
    ("gemma", "config", {"mm_tokens_per_image": 7}),
    ("gemma", "processor_config", {"image_seq_length": 1 << 40}),
    ("gemma", "tokenizer_config", {"boi_token": None}),
    ("gemma", "tokenizer_config", {"image_token": "<|other|>"}),
    ("gemma", "tokenizer_config", {"eoi_token": {"content": 5}}),
    *((family, "preprocessor_config", {"size": {"longest_edge": 97}}) for family in ("pixtral", "mistral")),
    *((family, "preprocessor_config", {"size": None}) for family in ("pixtral", "mistral")),
    *((family, "preprocessor_config", {"do_center_crop": True}) for family in ("pixtral", "mistral")),
    *((family, "config", {"image_token_index": 5}) for family in ("pixtral", "mistral")),
    *((family, "processor_config", {"image_break_token": "[nothing]"}) for family in ("pixtral", "mistral")),
    *((family, "processor_config", {"spatial_merge_size": 3}) for family in ("pixtral", "mistral")),
    *((family, "processor_config", {"patch_size": 9}) for family in ("pixtral", "mistral")),
]


@pytest.mark.parametrize(("family", "file", "changes"), UNSURE)
def test_a_model_in_doubt_has_no_rule(family: str, file: str, changes: dict[str, Any]) -> None:
    """Unknown architectures or processors, custom code, options and contradictions give no rule."""
    files = files_of(family)
    changed = {**files.get(file, {}), **changes}
    files[file] = {name: value for name, value in changed.items() if value is not None}
    assert rule_of(family, files) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(st.data(), st.sampled_from(list(FAMILIES)))
@settings(deadline=None)
def test_arbitrary_settings_give_a_bounded_rule_or_none(data: st.DataObject, family: str) -> None:
    """Arbitrary settings give a rule with a bounded number of ids, or none."""
    files = files_of(family)
    for _ in range(data.draw(st.integers(1, 3))):
        settings_ = files[data.draw(st.sampled_from(sorted(files)))]
        name = data.draw(st.sampled_from(sorted(settings_)))
        inner = settings_[name]
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            settings_, name = inner, data.draw(st.sampled_from(sorted(inner)))
        settings_[name] = data.draw(VALUES)
    rule = rule_of(family, files)
    ids = None if rule is None else rule.expand(SIZE)
    assert ids is None or 0 < len(ids) <= 10_000


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """An invalid JSON file raises TokenizerLoadError with its path."""
    for name in ("preprocessor_config.json", "chat_template.json"):
        write_model(tmp_path, "qwen")
        (tmp_path / name).write_text("{")
        with pytest.raises(TokenizerLoadError, match=name):
            PromptTokenizer.from_directory(tmp_path)
        (tmp_path / name).unlink()


def test_a_processors_template_takes_precedence(tmp_path: Path) -> None:
    """Chats without tools use the processor's template, others the tokenizer's, as in vLLM."""
    write_model(tmp_path, "qwen", template=TEXT)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{% for m in messages %}P{% endfor %}"}')
    tokenizer = PromptTokenizer.from_directory(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(messages) == "P"
    assert tokenizer.render_chat(messages, tools=[{}]) == "<turn>user\na<turn>assistant"
    (tmp_path / "preprocessor_config.json").unlink()
    assert PromptTokenizer.from_directory(tmp_path).render_chat(messages) != "P"
