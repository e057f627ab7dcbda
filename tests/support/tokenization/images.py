"""Kit of small models with images: directories as on the Hub, and image files."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tokenization import TINY_DIRECTORY

SPECIAL = (
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>", "<turn>"),
)
_NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
_LETTERS = [
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!<>/|_[]",
    *_NEWLINES,
    "<unk>",
]

# Renders each part in its place.
PARTS = """{%- for message in messages -%}
<turn>{{ message.role }}
{% for part in message.content -%}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif -%}
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt %}<turn>assistant
{% endif -%}"""
# Takes only text.
TEXT = """{% for message in messages %}<turn>{{ message.role }}
{{ message.content }}

{%- endfor %}
<turn>assistant"""

QWEN_IMAGE = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "min_pixels": 3136,
    "max_pixels": 401_408,
}
LLAVA_VISION = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
PIXTRAL_VISION = {"model_type": "pixtral", "image_size": 96, "patch_size": 8}
_PIXTRAL = {"processor_class": "PixtralProcessor", "size": {"longest_edge": 96}, "patch_size": 8}

# Family -> placeholder of an image, and the files beside the tokenizer.
FAMILIES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "qwen": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "config": {
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
            },
            "preprocessor_config": QWEN_IMAGE,
        },
    ),
    "llava": (
        "<image>",
        {
            "config": {
                "architectures": ["LlavaForConditionalGeneration"],
                "vision_config": LLAVA_VISION,
                "vision_feature_select_strategy": "default",
            },
            "preprocessor_config": {"processor_class": "LlavaProcessor"},
        },
    ),
    "gemma": (
        "<start_of_image>",
        {
            "config": {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 6},
            "preprocessor_config": {"do_pan_and_scan": None, "image_processor_type": "Gemma3ImageProcessor"},
            "processor_config": {"processor_class": "Gemma3Processor", "image_seq_length": 6},
            "tokenizer_config": {
                "boi_token": "<start_of_image>",
                "image_token": "<image_soft_token>",
                "eoi_token": "<end_of_image>",
            },
        },
    ),
    "pixtral": (
        "[IMG]",
        {
            "config": {"architectures": ["LlavaForConditionalGeneration"], "vision_config": PIXTRAL_VISION},
            "preprocessor_config": {**_PIXTRAL, "image_processor_type": "PixtralImageProcessorFast"},
        },
    ),
    "mistral": (
        "[IMG]",
        {
            "config": {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "vision_config": PIXTRAL_VISION,
                "spatial_merge_size": 2,
            },
            "preprocessor_config": _PIXTRAL,
            "processor_config": {
                "processor_class": "PixtralProcessor",
                "patch_size": 8,
                "spatial_merge_size": 2,
            },
        },
    ),
}


@cache
def library(family: str) -> Tokenizer:
    """Return the family's tokenizer: Gemma's has newlines as characters, the others are byte-level."""
    if family != "gemma":
        tokenizer = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    else:
        merges = [("\n", "\n"), ("\n\n", "\n\n"), ("\n\n", "\n")]
        vocabulary = {text: at for at, text in enumerate(_LETTERS)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return tokenizer


def files_of(family: str) -> dict[str, dict[str, Any]]:
    """Return the family's files by name without suffix, for a test to change."""
    files = json.loads(json.dumps(FAMILIES[family][1]))
    placeholder = "[IMG]" if family in ("pixtral", "mistral") else "<image>"
    if family in ("llava", "pixtral", "mistral"):
        files["config"]["image_token_index"] = library(family).token_to_id(placeholder)
    return files


def write_model(
    directory: Path, family: str, files: dict[str, dict[str, Any]] | None = None, template: str = PARTS
) -> Path:
    """Write a model's directory without weights."""
    for name, content in (files_of(family) if files is None else files).items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    library(family).save(str(directory / "tokenizer.json"))
    source = template.replace("IMAGE", FAMILIES[family][0])
    (directory / "chat_template.jinja").write_text(source)
    return directory


def image_url(width: int, height: int, form: str = "PNG", **options: Any) -> str:
    """Return an image of this size as a data URL."""
    data = io.BytesIO()
    Image.new("RGB", (width, height), 1).save(data, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def image_part(width: int, height: int, uuid: object = None, **options: Any) -> dict[str, Any]:
    """Return a chat's part with an image of this size, optionally with a name."""
    part = {"type": "image_url", "image_url": {"url": image_url(width, height, **options)}}
    return part if uuid is None else {**part, "uuid": uuid}
