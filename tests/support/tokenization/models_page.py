"""Table of docs/models.md: how exact the token ids of each family of models are, with counted proofs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import NamedTuple

from tests.support.paths import DATA, ROOT

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: made by its test -->\n", "<!-- end of the table -->\n"
_HEAD = ("family", "APIs", "ids come from", "compared with vLLM 0.32", "since")
_TEMPLATED = json.loads((DATA / "vllm_0_32_prompts.json").read_text("utf-8"))["cases"]


class Counts(NamedTuple):
    """Chats that vLLM renders: with equal ids here, and with none."""

    equal: int
    none: int


def table(counts_of: Callable[[str], Counts], versions: tuple[str, ...]) -> str:
    """Return the table, with what `counts_of` counts for gpt-oss and each version of Mistral's format."""
    rows = [
        _HEAD,
        ("---",) * len(_HEAD),
        (
            "any with a chat template: Llama, Qwen, GLM, Gemma and others",
            "chat, completions, messages, responses",
            "`tokenizer.json` and the template",
            f"{len(_TEMPLATED)} of {len(_TEMPLATED)} requests equal",
            "0.1",
        ),
        (
            "gpt-oss",
            "chat, messages",
            "oss-harmony (`kvroute[models]`)",
            _shown(counts_of("gpt-oss")),
            "unreleased",
        ),
        (
            "gpt-oss",
            "completions",
            "`tokenizer.json`",
            "as any other model; not run with its own file",
            "0.1",
        ),
        *(
            (
                f"Mistral's own format, {version.replace('-', ' ')}",
                "chat, completions, messages",
                "mistral-common (`kvroute[models]`)",
                _shown(counts_of(version)),
                "unreleased",
            )
            for version in versions
        ),
        ("gpt-oss, Mistral's own format", "responses", "the pods", "vLLM's own answer", "unreleased"),
        (
            "DeepSeek V3.2 and later, Kimi K3, Inkling",
            "chat, messages, responses",
            "the pods",
            "vLLM's own answer; **not run**: their tokenizers could not be had",
            "unreleased",
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page_with(text: str) -> tuple[str, str]:
    """Return the page as it is and with this table; with UPDATE_MODELS=1 the page is written first."""
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    wanted = before + BEGIN + text + END + rest.partition(END)[2]
    if os.environ.get("UPDATE_MODELS"):
        PAGE.write_text(wanted, "utf-8")
        page = wanted
    return page, wanted


def _shown(counts: Counts) -> str:
    total = counts.equal + counts.none
    return f"{counts.equal} of {total} chats equal, {counts.none} without ids"
