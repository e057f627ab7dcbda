"""Chats of several model families: ids equal those of transformers, messages are treated as by vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.support.tokenization.tokenizers import small
from tokenization import MediaPromptError, PromptError, PromptTokenizer
from tokenization.prompts import chat_prefix, chat_prompt, completion_prompts
from tokenization.templates.chat_template import ChatTemplate

# Each in its family's style: BOS by the template, headers, trimming, tools, parts, thinking, documents.
LLAMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- for tool in tools or [] %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
{%- for call in message.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
QWEN = """\
{%- for document in documents or [] %}{{ '[' + document.title + '] ' + document.text + '\\n' }}{% endfor %}
{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<s><|end_header_id|></s>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{%- generation %}{{ '' }}{% endgeneration %}
{{- '<|eot_id|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL}

TALK = [
    {"role": "user", "content": "Why is the sky blue? 世界 😀"},
    {"role": "assistant", "content": "Rayleigh."},
    {"role": "user", "content": " And at night?\n"},
]
OPEN = [*TALK, {"role": "assistant", "content": "At night it"}]
SYSTEM = [{"role": "system", "content": "Be terse. "}, *TALK]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": [1, 2]}}}
CALLED = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "dark"},
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": None, "parameters": {"type": "object", "required": []}},
}
DOCUMENT = {"title": "Sky", "text": "It is dark."}
CASES = [
    ("llama", TALK, {}),
    ("llama", SYSTEM, {"add_generation_prompt": False}),
    ("llama", CALLED, {"tools": [TOOL, TOOL]}),
    ("llama", OPEN, {"add_generation_prompt": False, "continue_final_message": True}),
    ("qwen", TALK, {"tools": [TOOL]}),
    ("qwen", SYSTEM, {"documents": [DOCUMENT]}),
    ("mistral", TALK, {}),
    ("mistral", OPEN, {"add_generation_prompt": False, "continue_final_message": True}),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model directory per template, with a real tokenizer that adds BOS itself."""
    tokenizer = small()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
    }
    made = {}
    for name, template in TEMPLATES.items():
        made[name] = tmp_path_factory.mktemp(name)
        tokenizer.save(str(made[name] / "tokenizer.json"))
        (made[name] / "chat_template.jinja").write_text(template)
        (made[name] / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, PromptTokenizer]:
    """Return our tokenizers of the directories."""
    return {name: PromptTokenizer.from_directory(directory) for name, directory in directories.items()}


@pytest.fixture(scope="module")
def references(directories: dict[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    """Return transformers' tokenizers of the directories."""
    return {
        name: PreTrainedTokenizerFast.from_pretrained(directory) for name, directory in directories.items()
    }


def over_the_wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the API's form, with arguments as JSON text."""
    carried = json.loads(json.dumps(messages))
    for message in carried:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return carried


@pytest.mark.parametrize(("name", "messages", "options"), CASES)
def test_chat_ids_equal_transformers(
    models: dict[str, PromptTokenizer],
    references: dict[str, PreTrainedTokenizerFast],
    name: str,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    """The rendered text, encoded without a second BOS, has the ids of apply_chat_template."""
    body = {"messages": over_the_wire(messages), **options}
    defaults = {"add_generation_prompt": True, "return_dict": False, "tokenize": True}
    expected = references[name].apply_chat_template(messages, **{**defaults, **options})
    assert chat_prompt(body, models[name]).tolist() == expected


@pytest.mark.parametrize(
    ("said", "is_shown"), [("At night", True), ("At night ", True), ("It is|At night", False), ("|", False)]
)
def test_an_answer_that_the_template_changes_cannot_be_continued(
    references: dict[str, PreTrainedTokenizerFast], said: str, is_shown: bool
) -> None:
    """A last message can be continued only if the template shows all of it, as in engines."""
    shown = "{% set text = text.split('|')[-1] %}{{ text | trim }}. "
    plain = f"{{% for m in messages %}}{{% set text = m.content %}}{shown}{{% endfor %}}"
    by_parts = "{% for m in messages %}{% for p in m.content %}{% set text = p.text %}"
    by_parts += f"{shown}{{% endfor %}}{{% endfor %}}"
    texts = ["When?", said]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for source, contents in (
        (plain, texts),
        (by_parts, [[{"type": "text", "text": text}] for text in texts]),
    ):
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        ours = ChatTemplate(source, {})
        if is_shown:
            theirs = references["llama"].apply_chat_template(
                messages, chat_template=source, tokenize=False, **options
            )
            assert ours.render(messages, **options) == theirs
            continue
        with pytest.raises(ValueError, match="continue_final_message"):
            references["llama"].apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        with pytest.raises(PromptError) as caught:
            ours.render(messages, **options)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["The sky", "<s>The sky</s>", ""])
def test_completion_ids_equal_transformers(
    models: dict[str, PromptTokenizer],
    references: dict[str, PreTrainedTokenizerFast],
    text: str,
    special: bool,
) -> None:
    """The post-processor adds BOS if requested, even if the text begins with one."""
    (ids,) = completion_prompts({"prompt": text, "add_special_tokens": special}, models["llama"])
    assert ids.tolist() == references["llama"](text, add_special_tokens=special).input_ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kept", [1, 2, 5, 8, 100])
def test_truncation_equals_transformers(
    models: dict[str, PromptTokenizer],
    references: dict[str, PreTrainedTokenizerFast],
    kept: int,
    side: str,
) -> None:
    """A truncated prompt keeps BOS, and its end unless the beginning is requested, as in vLLM."""
    text = "Why is the sky blue, and what colour has it at night?"
    # With a given side vLLM truncates by its own code, see its vectors.
    named = {"truncation_side": side} if side == "right" else {}
    body = {"prompt": text, "truncate_prompt_tokens": kept, **named}
    reference = references["llama"]
    reference.truncation_side = side
    expected = reference(text, truncation=True, max_length=kept).input_ids
    (ids,) = completion_prompts(body, models["llama"])
    assert ids.tolist() == expected


def same(model: PromptTokenizer, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two bodies have the same token ids."""
    return np.array_equal(chat_prompt(one, model), chat_prompt(other, model))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"content": None}, {"content": ""}),
        ({"content": ["a", {"type": "text", "text": ""}, "b"]}, {"content": "a\nb"}),
        ({"content": [{"type": "text", "text": None}]}, {"content": ""}),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, {"content": "hm"}),
        ({"content": "a", "tool_calls": []}, {"content": "a"}),
        ({"content": "a", "tool_calls": None}, {"content": "a"}),
    ],
)
def test_contents_are_converted_as_by_vllm(
    models: dict[str, PromptTokenizer], given: dict[str, Any], meant: dict[str, Any]
) -> None:
    """A template without parts receives empty, missing and partitioned contents as from vLLM."""
    one = {"messages": [*TALK, {"role": "assistant", **given}]}
    assert same(models["llama"], one, {"messages": [*TALK, {"role": "assistant", **meant}]})


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '"text"', None, "[" * 100_000])
def test_invalid_arguments_are_empty(models: dict[str, PromptTokenizer], arguments: str | None) -> None:
    """A conversation with a broken tool call is still rendered, as in vLLM."""
    message = {"role": "assistant", "content": ""}
    broken = {**message, "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
    empty = {**message, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    assert same(models["llama"], {"messages": [broken]}, {"messages": [empty]})


def test_a_tools_fields_are_ordered_and_complete(models: dict[str, PromptTokenizer]) -> None:
    """A rendered tool has vLLM's form: all known fields in order, no unknown ones."""
    short = {"function": {"parameters": {}, "name": "look"}, "type": "function", "x": 1}
    full = {"type": "function", "function": {"name": "look", "description": None, "parameters": {}}}
    bodies = [{"messages": TALK, "tools": [tool]} for tool in (short, full)]
    assert same(models["qwen"], *bodies)
    # `tool_choice` "none" keeps the tools in the prompt.
    assert same(models["qwen"], bodies[0], {**bodies[0], "tool_choice": "none"})


def test_reasoning_reaches_the_template_under_both_names(models: dict[str, PromptTokenizer]) -> None:
    """An assistant's reasoning, from either field, reaches the template under both names."""
    old, new = (
        {"messages": [{"role": "assistant", "content": "a", name: "hm"}]}
        for name in ("reasoning_content", "reasoning")
    )
    assert same(models["qwen"], old, new)
    assert "<think>hm</think>" in models["qwen"].decode(chat_prompt(new, models["qwen"]).tolist())
    user = {"messages": [{"role": "user", "content": "a", "reasoning": "hm"}]}
    assert same(models["qwen"], user, {"messages": [{"role": "user", "content": "a"}]})


def test_options_of_the_template(models: dict[str, PromptTokenizer]) -> None:
    """Template variables, documents and effort reach the template; explicit fields take precedence."""
    model, body = models["qwen"], {"messages": TALK}
    thoughtless = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    assert not same(model, body, thoughtless)
    assert same(model, {**body, "reasoning_effort": "none"}, thoughtless)
    assert same(model, {**body, "reasoning_effort": "high"}, body)
    assert same(model, {**thoughtless, "reasoning_effort": "high"}, thoughtless)
    given = {**body, "documents": [DOCUMENT]}
    assert same(model, given, {**body, "chat_template_kwargs": {"documents": [DOCUMENT]}})
    assert same(model, body, {**body, "chat_template_kwargs": {"add_generation_prompt": False}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": "x"}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "top"}, "truncation_side"),
    ],
)
def test_a_wrong_option_names_its_field(
    models: dict[str, PromptTokenizer], fields: dict[str, Any], param: str
) -> None:
    """An invalid option is rejected with the field's name."""
    with pytest.raises(PromptError) as caught:
        chat_prompt({"messages": TALK, **fields}, models["qwen"])
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_the_prefix_before_an_image_is_known(models: dict[str, PromptTokenizer], name: str) -> None:
    """A chat with an image begins with the ids of the same chat without it, up to a special token."""
    model = models[name]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
    body = {"messages": [*TALK, asked, *TALK]}
    with pytest.raises(MediaPromptError):
        chat_prompt(body, model)
    known = chat_prefix(body, model)
    before = chat_prompt({"messages": TALK, "add_generation_prompt": False}, model)
    assert len(known) >= len(before) - 1
    assert np.array_equal(known[: len(before) - 1], before[: len(before) - 1])
    plain = {"role": "user", "content": [{"type": "text", "text": "It"}]}
    assert np.array_equal(known, chat_prompt({"messages": [*TALK, plain]}, model)[: len(known)])
