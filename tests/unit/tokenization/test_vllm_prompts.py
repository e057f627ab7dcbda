"""Prompts compared with the recorded text or token ids of the real vLLM, for four APIs."""

from __future__ import annotations

import copy
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, Tokenizer, processors

from tests.support.paths import DATA
from tests.support.tokenization.mistral import write_mistral
from tests.support.tokenization.tokenizers import SPECIAL, tekken
from tokenization import TINY_DIRECTORY, PromptTokenizer, UnsupportedPromptError
from tokenization.apis.anthropic import messages_as_chat
from tokenization.apis.responses import responses_as_chat
from tokenization.prompts import PromptLimits, chat_prompt, completion_prompts
from tokenization.templates.chat_template import ChatTemplate

VECTORS = json.loads((DATA / "vllm_0_32_prompts.json").read_text("utf-8"))
TEKKEN = str(files("mistral_common.data").joinpath("tekken_240911.json"))
OWN_FILES = {"tekken.json": "tekken-v3", "tokenizer.model.v3": "mistral-v3"}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def without_template() -> PromptTokenizer:
    """Return the tokenizer of the recorded cases."""
    tokenizer = Tokenizer.from_str(tekken().to_str())
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PromptTokenizer(tokenizer, None, frozenset())


@cache
def model(template: str) -> PromptTokenizer:
    """Return the recorded cases' tokenizer with one of their templates."""
    # A copy, because loading the vocabulary takes seconds.
    tokenizer = copy.copy(without_template())
    tokenizer.chat_template = ChatTemplate(VECTORS["templates"][template], SPECIAL_TOKENS)
    return tokenizer


def prompts(case: dict[str, Any]) -> list[list[int]]:
    """Return the router's token ids of a case's prompts."""
    tokenizer, body = model(case["template"]), case["body"]
    limits = PromptLimits(context_tokens=case.get("context_tokens"))
    if case["api"] == "completions":
        return [ids.tolist() for ids in completion_prompts(body, tokenizer, limits)]
    if case["api"] == "messages":
        assert tokenizer.chat_template is not None
        body = messages_as_chat(body, tokenizer.chat_template.effort_without_thinking)
    if case["api"] == "responses":
        body = responses_as_chat(body)
    return [chat_prompt(body, tokenizer, limits).tolist()]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[case["name"] for case in VECTORS["cases"]])
def test_a_prompt_is_the_one_that_vllm_makes(case: dict[str, Any]) -> None:
    """The router and our engine produce vLLM's prompt for every recorded template and body."""
    tokenizer = model(case["template"])
    expected = case.get("ids") or [tokenizer.encode(case["text"], add_special_tokens=False)]
    assert prompts(case) == expected


def test_a_developer_message_in_a_known_conversation_has_vllms_ids() -> None:
    """A turn appended to a known conversation gets the ids of the whole, whatever the message's role."""
    system, user, answer, developer = (
        {"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "developer")
    )
    turns = [system, user, answer, developer, user, answer, system, user, answer, user]
    known = model("turns")
    for count in (2, 5, 8, 10):
        body = {"messages": turns[:count]}
        raw = {"messages": msgspec.Raw(msgspec.json.encode(turns[:count]))}
        assert chat_prompt(raw, known).tolist() == chat_prompt(body, known).tolist()


def test_a_suffix_is_placed_as_by_vllm() -> None:
    """A completion with `suffix` gets vLLM's text for models with such code, and is rejected for others."""
    with pytest.raises(UnsupportedPromptError):
        completion_prompts({"prompt": "a", "suffix": "b"}, model("llama"))
    assert completion_prompts({"prompt": "a", "suffix": None}, model("llama"))


def from_directory(
    directory: Path, settings: dict[str, Any], config: dict[str, Any], library: Tokenizer | None = None
) -> PromptTokenizer:
    """Load a model with these settings and a small tokenizer unless another is given."""
    if library is None:
        library = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
        library.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**SPECIAL_TOKENS, **settings}))
    (directory / "config.json").write_text(json.dumps(config))
    return PromptTokenizer.from_directory(directory)


TWO_TEMPLATES = {
    "default": "plain {% for m in messages %}{{ m.content }}{% endfor %}",
    "tool_use": "tools {% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize("in_files", [True, False])
def test_chats_with_tools_have_their_own_template(tmp_path: Path, in_files: bool) -> None:
    """A model's second template is used for chats with tools, with its own content format."""
    if in_files:
        (tmp_path / "chat_template.jinja").write_text(TWO_TEMPLATES["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TWO_TEMPLATES["tool_use"])
    named = [{"name": name, "template": source} for name, source in TWO_TEMPLATES.items()]
    tokenizer = from_directory(tmp_path, {} if in_files else {"chat_template": named}, {})
    tools = [{"type": "function", "function": {"name": "look"}}]
    for fields, text in (({}, "plain a\nb"), ({"tools": tools}, "tools ab")):
        ids = chat_prompt({"messages": PARTS, **fields}, tokenizer).tolist()
        assert tokenizer.decode(ids) == text


def test_a_template_knows_the_models_own_special_tokens(tmp_path: Path) -> None:
    """Special tokens of the model are template variables by name, as in transformers."""
    settings = {
        "chat_template": "{{ image_token }}{{ other_token }}{{ bos_token }}",
        "extra_special_tokens": {"image_token": "[INST]", "other_token": {"content": "[/INST]"}},
    }
    tokenizer = from_directory(tmp_path, settings, {})
    ids = chat_prompt({"messages": PARTS}, tokenizer).tolist()
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[INST][/INST]<s>"


@pytest.mark.parametrize(
    "config",
    [{"architectures": [name]} for name in ("DeepseekV32ForCausalLM", "KimiK3ForConditionalGeneration")],
)
def test_a_chat_rendered_by_vllms_code_has_no_ids(tmp_path: Path, config: dict[str, Any]) -> None:
    """If vLLM renders a chat by code instead of a template, its ids are unknown."""
    settings = {"chat_template": TWO_TEMPLATES["default"]}
    with pytest.raises(UnsupportedPromptError):
        chat_prompt({"messages": PARTS}, from_directory(tmp_path, settings, config))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert chat_prompt({"messages": PARTS}, from_directory(tmp_path, settings, config)).tolist()


@pytest.mark.parametrize(
    ("names", "is_theirs"),
    [
        (["tekken.json", "consolidated-00001-of-00002.safetensors", "model.safetensors"], True),
        (["tekken.json"], True),
        (["tokenizer.model.v3"], True),
        (["tekken.json", "model-00001-of-00002.safetensors"], False),
        (["tokenizer.model", "consolidated.safetensors"], False),
        ([], False),
    ],
)
def test_mistral_common_renders_where_engines_use_it(
    tmp_path: Path, names: list[str], is_theirs: bool
) -> None:
    """Mistral's own file decides unless the weights have another form; the template renders otherwise."""
    for name in names:
        (tmp_path / name).touch()
        if name in OWN_FILES:
            write_mistral(tmp_path, OWN_FILES[name])
    settings = {"chat_template": TWO_TEMPLATES["default"]}
    tokenizer = from_directory(tmp_path, settings, {})
    if is_theirs:
        assert tokenizer.chat_template is None
        assert tokenizer.coded is not None
        tokenizer = PromptTokenizer.from_directory(tmp_path, by_library=False)
    assert tokenizer.decode(chat_prompt({"messages": PARTS}, tokenizer).tolist()) == "plain a\nb"


def test_a_text_has_mistral_commons_ids(tmp_path: Path) -> None:
    """Tekken texts have mistral-common's ids, and special tokens are text; truncated texts have none."""
    ours = from_directory(write_mistral(tmp_path, "tekken-v3"), {}, {}, tekken())
    theirs = Tekkenizer.from_file(TEKKEN)
    for text in ("", "The sky is  blue.\n\n", " é 😀 1234567", "a [INST ] b"):
        # In this tokenizer special tokens come after all others.
        ids = [theirs.num_special_tokens + at for at in ours.encode(text, add_special_tokens=False)]
        assert ids == theirs.encode(text, bos=False, eos=False)
        marked = f"{text}[INST]"
        assert ours.encode(marked) == theirs.encode(marked, bos=True, eos=False)
        with pytest.raises(UnsupportedPromptError):
            completion_prompts({"prompt": text, "truncate_prompt_tokens": 1}, ours)


def test_ids_of_a_sentencepiece_model_are_kept(tmp_path: Path) -> None:
    """Token ids given by the client are the prompt, whatever encodes the model's texts."""
    ours = from_directory(write_mistral(tmp_path, "mistral-v3"), {}, {})
    assert completion_prompts({"prompt": [1, 2]}, ours)[0].tolist() == [1, 2]
