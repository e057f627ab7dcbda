"""Kit of directories with Mistral's own tokenizers, made of the vocabularies within mistral-common."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from mistral_common.tokens.tokenizers.base import SpecialTokens

TEKKEN = "tekken_240911.json"
SENTENCEPIECE = "mistral_instruct_tokenizer_240323.model.v3"
# Versions of the format by name; each differs in the form of system messages, tools, calls or reasoning.
VERSIONS = ("mistral-v3", "tekken-v3", "tekken-v7", "tekken-v11", "tekken-v13", "tekken-v15")
_EFFORT = {"type": "enum", "accepts_none": True, "values": ["none", "high"], "default": "none"}


def write_mistral(directory: Path, version: str) -> Path:
    """Write a model's tokenizer file of this version into a directory."""
    data = files("mistral_common.data")
    if version == "mistral-v3":
        (directory / "tokenizer.model.v3").write_bytes((data / SENTENCEPIECE).read_bytes())
        return directory
    tekken = json.loads((data / TEKKEN).read_text())
    number = tekken["config"]["version"] = version.removeprefix("tekken-")
    if number not in ("v3", "v7"):
        tekken["special_tokens"] = [
            {"rank": rank, "token_str": token.value, "is_control": True}
            for rank, token in enumerate(SpecialTokens)
        ]
    if number == "v15":
        tekken["model_settings_builder"] = {"reasoning_effort": _EFFORT}
    (directory / "tekken.json").write_text(json.dumps(tekken))
    return directory
