"""A model's files: where they come from, and by which of them engines read its chats and prompts.

Knows the Hugging Face Hub, the files that `transformers` reads, the models whose chats vLLM's server writes
by code of its own, and vLLM's rule for `mistral-common`: the directory holds Mistral's own form of the
tokenizer and of the weights. Chats then have no template, and a special token's text within a prompt is text.
Compiles and renders nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenization.errors import TokenizerLoadError

_DEFAULT, _TOOLS = "default", "tool_use"
# An older form of a processor's template, beside the files that make a model have a processor.
_PROCESSORS_TEMPLATE = "chat_template.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_FILES = {_DEFAULT: "chat_template.jinja", _TOOLS: "additional_chat_templates/tool_use.jinja"}
# As in vLLM 0.32; whatever template these have is not what it shows.
_OWN_MODEL_TYPE = "gpt_oss"
_OWN_ARCHITECTURES = frozenset(
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
    """Jinja sources: of most chats (None: there is none), and of chats with tools (None: the same)."""

    default: str | None
    tools: str | None


def template_sources(
    directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> TemplateSources:
    """Reads a model's templates; files go before settings.

    Args:
        settings: Of its tokenizer_config.json.
        config: Of its config.json.

    Raises:
        TokenizerLoadError: A file is broken.
    """
    if _is_written_by_code(config):
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
    processors = _processors_template(directory)
    if processors is not None:
        # vLLM asks the processor first, and for chats with tools the tokenizer alone.
        return TemplateSources(processors, tools or default)
    return TemplateSources(default, tools)


def read_json(path: Path) -> dict[str, Any]:
    """Reads an optional JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path}: must hold a JSON object")
    return value


def token_text_of(value: object) -> str | None:
    """A special token is written as its text, or as an AddedToken's dict."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _processors_template(directory: Path) -> str | None:
    if not any((directory / name).is_file() for name in _PROCESSORS):
        return None
    source = read_json(directory / _PROCESSORS_TEMPLATE).get("chat_template")
    return source if isinstance(source, str) else None


def _is_written_by_code(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return config.get("model_type") == _OWN_MODEL_TYPE or any(
        isinstance(name, str) and name in _OWN_ARCHITECTURES for name in names
    )


_TEKKEN, _SENTENCEPIECE = "tekken.json", "tokenizer.model.v*"
_OWN_WEIGHTS, _WEIGHTS = "consolidated*.safetensors", "*.safetensors"
_ANY_TEXT = re.compile("")


def read_by_mistral(directory: Path, special_tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Parts of every text that a tokenizer of Mistral's own reads otherwise than `tokenizer.json`.

    Without any weights the directory does not tell, and Mistral's tokenizer is taken for the engines' own:
    rather no ids than wrong ones.

    Args:
        special_tokens: Of tokenizer.json.

    Returns:
        None where engines take `tokenizer.json` for this model.
    """
    if any(directory.glob(_WEIGHTS)) and not any(directory.glob(_OWN_WEIGHTS)):
        return None
    if (directory / _TEKKEN).is_file():
        texts = [re.escape(text) for text in special_tokens]
        # A pattern of nothing would be found everywhere.
        return re.compile("|".join(texts) if texts else "(?!)")
    return _ANY_TEXT if any(directory.glob(_SENTENCEPIECE)) else None


# No weights: what PromptTokenizer.from_directory reads or looks for.
_HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "tokenizer.model.v*",
)


def hub_directory(repository: str, revision: str, cache: Path | None = None) -> Path:
    """Fetches a model's files from the Hugging Face Hub, as far as they are not in its usual cache yet.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to every Hub client.

    Args:
        repository: "owner/name".
        revision: Commit, tag or branch; only a commit stays the same for ever.
        cache: Where to keep files; None: the Hub's usual place.

    Raises:
        TokenizerLoadError: The Hub cannot be reached, or does not have it; or its client is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise TokenizerLoadError("huggingface_hub is not installed; pip install 'kvroute[hub]'") from error
    try:
        return Path(
            snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=list(_HUB_FILES))
        )
    except GatedRepoError as error:
        raise TokenizerLoadError(
            f"{repository} is gated; set HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise TokenizerLoadError(f"{repository} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise TokenizerLoadError(
            f"{repository} is not on the Hub; if it is private, set HF_TOKEN to a token that may read it"
        ) from error
    except LocalEntryNotFoundError as error:
        raise TokenizerLoadError(
            f"{repository}@{revision} is not in the cache, and the Hub is not to be reached: {error}"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TokenizerLoadError(f"{repository}@{revision} cannot be fetched: {error}") from error
