"""Files of a model: download from the Hugging Face Hub, and selection of its chat templates.

Covers the files that `transformers` reads, the models whose chats vLLM's server renders by code, and vLLM's
rule for `mistral-common`: the directory contains the tokenizer and the weights in Mistral's own formats.
Such chats have no template, and the text of a special token within a prompt is plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenization.errors import TokenizerLoadError

_DEFAULT, _TOOLS = "default", "tool_use"
# Older file of a processor's template, and the files that show that a model has a processor.
_PROCESSOR_TEMPLATE = "chat_template.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_FILES = {_DEFAULT: "chat_template.jinja", _TOOLS: "additional_chat_templates/tool_use.jinja"}
# Models that vLLM 0.32 renders by code instead of their templates.
GPT_OSS = "gpt_oss"
_CODE_ARCHITECTURES = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "DeepseekV41ForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
    }
)


class TemplateSources(NamedTuple):
    """Jinja sources: default (None: no template) and for chats with tools (None: same as default)."""

    default: str | None
    tools: str | None


def template_sources(
    directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> TemplateSources:
    """Read a model's templates; template files take precedence over settings.

    Args:
        settings: Content of tokenizer_config.json.
        config: Content of config.json.

    Raises:
        TokenizerLoadError: A file is broken.
    """
    if _is_rendered_by_code(config):
        return TemplateSources(None, None)
    named: dict[object, object] = {
        name: path.read_text(encoding="utf-8")
        for name, file in _FILES.items()
        if (path := directory / file).is_file()
    }
    given = settings.get("chat_template")
    if not named and isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    elif not named:
        named = {_DEFAULT: given}
    default, tools = (
        source if isinstance(source := named.get(name), str) else None for name in (_DEFAULT, _TOOLS)
    )
    processor = _processor_template(directory)
    if processor is not None:
        # vLLM prefers the processor's template, except for chats with tools.
        return TemplateSources(processor, tools or default)
    return TemplateSources(default, tools)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path}: must contain a JSON object")
    return value


def token_text_of(value: object) -> str | None:
    """Return a special token's text from its text or its AddedToken dict; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _processor_template(directory: Path) -> str | None:
    if not any((directory / name).is_file() for name in _PROCESSORS):
        return None
    source = read_json(directory / _PROCESSOR_TEMPLATE).get("chat_template")
    return source if isinstance(source, str) else None


def _is_rendered_by_code(config: Mapping[str, Any]) -> bool:
    given = config.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    return config.get("model_type") == GPT_OSS or not _CODE_ARCHITECTURES.isdisjoint(names)


_TEKKEN, _SENTENCEPIECE = "tekken.json", "tokenizer.model.v*"
_MISTRAL_WEIGHTS, _WEIGHTS = "consolidated*.safetensors", "*.safetensors"
ANY_TEXT = re.compile("")


def mistral_file(directory: Path) -> Path | None:
    """Return the file of Mistral's own tokenizer; None if engines use `tokenizer.json` for this model.

    Without weights the engines' choice is unknown. Mistral's own is then assumed, because no ids are better
    than wrong ones.
    """
    if any(directory.glob(_WEIGHTS)) and not any(directory.glob(_MISTRAL_WEIGHTS)):
        return None
    tekken = directory / _TEKKEN
    return tekken if tekken.is_file() else max(directory.glob(_SENTENCEPIECE), default=None)


def mistral_pattern(file: Path, special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of texts that mistral-common encodes unlike `tokenizer.json` with these tokens."""
    if file.name != _TEKKEN:
        return ANY_TEXT
    texts = [re.escape(text) for text in special_tokens]
    # An empty pattern would match everywhere.
    return re.compile("|".join(texts) if texts else "(?!)")


# Files that PromptTokenizer.from_directory reads or looks for; no weights.
_HUB_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"),
    *(*_FILES.values(), _PROCESSOR_TEMPLATE, *_PROCESSORS, _TEKKEN, _SENTENCEPIECE),
)


def hub_directory(repository: str, revision: str) -> Path:
    """Download a model's files from the Hugging Face Hub unless they are cached; return their directory.

    Respects HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        repository: "owner/name".
        revision: Commit, tag or branch; only a commit never changes.

    Raises:
        TokenizerLoadError: The Hub is unreachable, lacks the files, or its client is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise TokenizerLoadError("huggingface_hub is not installed; pip install 'kvroute[hub]'") from error
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_FILES)))
    except LocalEntryNotFoundError as error:
        raise TokenizerLoadError(
            f"{repository}@{revision} is not cached, and the Hub is unreachable: {error}"
        ) from error
    except RepositoryNotFoundError as error:
        raise TokenizerLoadError(
            f"{repository} is gated, private or missing; set HF_TOKEN to a token that may read it"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TokenizerLoadError(f"{repository}@{revision} cannot be downloaded: {error}") from error
