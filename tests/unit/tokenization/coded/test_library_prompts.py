"""Prompts by the libraries oss-harmony and mistral-common, compared with ids from vLLM 0.32's own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.support.indexer.views import read_json
from tests.support.tokenization.mistral import VERSIONS, write_mistral
from tests.support.tokenization.models_page import Counts, page_with, table
from tokenization import (
    TINY_DIRECTORY,
    ManyItemsError,
    PromptError,
    PromptLimits,
    PromptTokenizer,
    TokenizerLoadError,
    UnsupportedPromptError,
    chat_prompt,
    messages_as_chat,
)
from tokenization.coded.harmony import HarmonyPrompts

VECTORS = read_json("vllm_0_32_library_prompts.json.gz")
CASES = {case["name"]: case for case in VECTORS["cases"]}
DATE = {"VLLM_SYSTEM_START_DATE": "2026-11-24"}
# Requests that vLLM accepts in forms that other releases may treat differently.
LEFT_OUT = {"truncated", "extra keys", "result without call", "image", "empty parts", "m no tools"}


@cache
def prompts_of(model: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function that makes a model's chat prompts."""
    if model == "gpt-oss":
        return HarmonyPrompts().chat
    with TemporaryDirectory() as directory:
        tokenizer = PromptTokenizer.from_directory(write_mistral(Path(directory), model))
    return lambda body: chat_prompt(body, tokenizer)


def ids(model: str, body: dict[str, Any], api: str = "chat") -> list[int] | None:
    """Return the ids of a chat on the day of the vectors; None if they are not known."""
    with patch.dict("os.environ", DATE):
        try:
            if api == "messages":
                body = messages_as_chat(body, "low" if model == "gpt-oss" else "none")
            return list(map(int, prompts_of(model)(body)))
        except PromptError:
            return None


@cache
def counts(model: str) -> Counts:
    """Count the chats that vLLM renders; the ids of those that it rejects are not compared."""
    rendered = [case for case in CASES.values() if case["ids"][model] is not None]
    got = [(case["ids"][model], ids(model, case["body"], case["api"])) for case in rendered]
    assert all(ours in (None, theirs) for theirs, ours in got)
    none = {case["name"] for case, (_, ours) in zip(rendered, got, strict=True) if ours is None}
    assert none <= LEFT_OUT
    return Counts(len(rendered) - len(none), len(none))


@pytest.mark.parametrize("model", ["gpt-oss", *VERSIONS])
def test_a_chat_has_the_ids_of_vllm_or_none(model: str) -> None:
    """Every chat that vLLM renders has the same ids here, hostile texts included; odd forms have none."""
    assert counts(model).equal > 2 * len(LEFT_OUT)


@pytest.mark.parametrize("model", VERSIONS)
def test_a_chat_that_mistral_common_rejects_has_no_ids(model: str) -> None:
    """Where the engine answers with an error, no ids are made up."""
    rejected = [
        case for case in CASES.values() if case["ids"][model] is None and case["name"] != "tools empty"
    ]
    assert {ids(model, case["body"], case["api"]) for case in rejected} == {None}


def test_the_page_of_models_shows_the_counts() -> None:
    """docs/models.md has the table that these comparisons give; UPDATE_MODELS=1 writes it."""
    page, wanted = page_with(table(counts, VERSIONS))
    assert page == wanted


def test_mistrals_texts_have_the_ids_of_vllm(tmp_path: Path) -> None:
    """Without tokenizer.json the library encodes a completion's text, special tokens as plain text."""
    for model in ("mistral-v3", "tekken-v3"):
        (tmp_path / model).mkdir()
        tokenizer = PromptTokenizer.from_directory(write_mistral(tmp_path / model, model))
        for text, special, want in VECTORS["texts"][model]:
            assert tokenizer.encode(text, add_special_tokens=special) == want


def test_the_local_date_stands_in_the_prompt() -> None:
    """Without a fixed date the prompt has this process's date, and none within seconds of midnight."""
    body = CASES["one user"]["body"]
    on = {
        at: HarmonyPrompts(lambda at=at: datetime.fromisoformat(at))
        for at in ("2026-11-24T12", "2026-11-25T00:01")
    }
    before, after = (prompts.chat(body).tolist() for prompts in on.values())
    assert before == CASES["one user"]["ids"]["gpt-oss"]
    assert sum(np.array(before) != np.array(after)) == 1
    for doubtful in ("2026-11-24T23:59:57", "2026-11-25T00:00:03"):
        with pytest.raises(UnsupportedPromptError, match="date"):
            HarmonyPrompts(lambda at=doubtful: datetime.fromisoformat(at)).chat(body)


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "\n" * 2000, "!?" * 1000, "é\u0301" * 1000, "a " * 600_000, "_" * 2000]
)
def test_a_text_that_encodes_slowly_is_not_encoded(text: str) -> None:
    """A word or text that would occupy the library for long has no ids, wherever it stands."""
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    for body in (
        {"messages": [{"role": "user", "content": text}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": half} for half in (text[:9], text[9:])]}
            ]
        },
        {"messages": [{"role": "user", "content": "a"}], "tools": [tool]},
    ):
        assert ids("gpt-oss", body) is None


def test_words_of_many_scripts_are_encoded() -> None:
    """Long texts without spaces, of ordinary punctuation, are not mistaken for one word."""
    for text in ("你好，世界。" * 500, "0123456789abcdef" * 500, "| --- " * 500, json.dumps([1] * 2000)):
        assert ids("gpt-oss", {"messages": [{"role": "user", "content": text}]}) is not None


@pytest.mark.parametrize("content", [["a"], [{"type": "text"}], {"type": "text", "text": "a"}, 1, [None]])
def test_an_odd_content_is_left_to_the_engine(content: object) -> None:
    """A content that is neither text nor texts has no ids, and the engine answers the request."""
    for prompts in (prompts_of("gpt-oss"), prompts_of("mistral-v3")):
        with pytest.raises(UnsupportedPromptError):
            prompts({"messages": [{"role": "user", "content": content}]})


def test_very_many_messages_have_no_ids(tmp_path: Path) -> None:
    """More messages than are rendered at once are left to a thread, and those above 2,000 have no ids."""
    tokenizer = PromptTokenizer.from_directory(gpt_oss(tmp_path))
    body = {"messages": [{"role": "user", "content": "a"}] * 2001}
    with pytest.raises(ManyItemsError):
        chat_prompt(body, tokenizer, PromptLimits(items_max=500))
    for prompts in (prompts_of("gpt-oss"), prompts_of("mistral-v3")):
        with pytest.raises(UnsupportedPromptError):
            prompts(body)


def gpt_oss(directory: Path) -> Path:
    """Write a model directory of gpt-oss with the tiny tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((TINY_DIRECTORY / name).read_bytes())
    (directory / "config.json").write_text('{"model_type": "gpt_oss"}')
    return directory


def test_gpt_oss_is_recognized_by_its_config(tmp_path: Path) -> None:
    """With gpt_oss in config.json, oss-harmony renders chats, and tokenizer.json encodes texts."""
    tokenizer = PromptTokenizer.from_directory(gpt_oss(tmp_path))
    with patch.dict("os.environ", DATE):
        assert chat_prompt(CASES["call"]["body"], tokenizer).tolist() == CASES["call"]["ids"]["gpt-oss"]
    assert tokenizer.encode("Hello") == PromptTokenizer.from_directory(TINY_DIRECTORY).encode("Hello")


@pytest.mark.parametrize("module", ["openai_harmony", "mistral_common.tokens.tokenizers.mistral"])
def test_a_missing_library_names_the_extra(tmp_path: Path, module: str) -> None:
    """A model whose library is not installed cannot be loaded; the error names the extra."""
    directory = gpt_oss(tmp_path) if module == "openai_harmony" else write_mistral(tmp_path, "mistral-v3")
    with (
        patch.dict("sys.modules", {module: None}),
        pytest.raises(TokenizerLoadError, match=r"kvroute\[models\]"),
    ):
        PromptTokenizer.from_directory(directory)


def test_openai_harmony_is_not_taken_for_oss_harmony() -> None:
    """The library openai-harmony, which downloads its vocabulary, does not count as installed."""
    gone = patch("tokenization.coded.harmony.version", side_effect=PackageNotFoundError)
    with gone, pytest.raises(TokenizerLoadError, match="oss-harmony"):
        HarmonyPrompts()


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    """A tekken.json that mistral-common cannot read is an error that names the file."""
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match=r"tekken\.json"):
        PromptTokenizer.from_directory(tmp_path)
