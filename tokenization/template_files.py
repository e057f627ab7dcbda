"""Which chat templates a model brings: its directory and settings in, sources out, as engines choose them.

Knows the files that `transformers` reads, and the models whose chats vLLM's server writes by code of its own.
Compiles and renders nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_DEFAULT, _TOOLS = "default", "tool_use"
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
    """Jinja sources.

    Attributes:
        default: For most chats; None: there is none.
        tools: For chats with tools; None: the same.
    """

    default: str | None
    tools: str | None


def template_sources(
    directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> TemplateSources:
    """Reads a model's templates; files go before settings.

    Args:
        directory: The model's.
        settings: Of its tokenizer_config.json.
        config: Of its config.json.
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
    return TemplateSources(default, tools)


def _is_written_by_code(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return config.get("model_type") == _OWN_MODEL_TYPE or any(
        isinstance(name, str) and name in _OWN_ARCHITECTURES for name in names
    )
