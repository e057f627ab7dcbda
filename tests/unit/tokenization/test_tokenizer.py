"""The packaged tokenizer, chat templates and incremental decoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.support.depth import examples
from tokenization import (
    TINY_DIRECTORY,
    IncrementalDecoder,
    MediaPromptError,
    PromptError,
    PromptTokenizer,
    PromptTooLongError,
    TokenizerLoadError,
)
from tokenization.prompts import PromptLimits, chat_prompt, completion_prompts
from tokenization.templates.chat_template import ChatTemplate

TINY = PromptTokenizer.from_directory(TINY_DIRECTORY)
CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Why is the sky blue? 世界 😀"},
    {"role": "assistant", "content": "Rayleigh."},
    {"role": "user", "content": "And at night?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": None, "parameters": {"type": "object"}},
}


def reference() -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer of the packaged directory."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TINY_DIRECTORY / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = (TINY_DIRECTORY / "chat_template.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [TOOL]},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_chat_ids_equal_transformers(options: dict[str, object]) -> None:
    """A rendered and encoded conversation has the ids of transformers' apply_chat_template."""
    options = {"add_generation_prompt": True, **options}
    expected = reference().apply_chat_template(CONVERSATION, tokenize=True, return_dict=False, **options)
    assert chat_prompt({"messages": CONVERSATION, **options}, TINY).tolist() == expected


@given(st.text(max_size=200))
@settings(max_examples=examples(200))
def test_text_survives_a_round_trip(text: str) -> None:
    """Encoding and decoding returns any text unchanged."""
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.one_of(st.integers(3, 258), st.integers(0, 4095)), max_size=60))
@settings(max_examples=examples(200))
def test_incremental_decoding_equals_decoding_at_once(token_ids: list[int]) -> None:
    """Pieces emitted one id at a time join to the text of all ids, also for broken UTF-8."""
    decoder = IncrementalDecoder(TINY)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + decoder.flush() == TINY.decode(token_ids)


def test_a_character_is_never_emitted_in_halves() -> None:
    """No piece contains U+FFFD if the whole text is valid."""
    decoder = IncrementalDecoder(TINY)
    pieces = [decoder.push(token_id) for token_id in TINY.encode("é 世界 😀 done")]
    assert "".join(pieces) == "é 世界 😀 done"
    assert not any("�" in piece for piece in pieces)


def test_broken_bytes_are_not_held_back_for_ever() -> None:
    """Bytes that cannot become a character are emitted after the maximum tokens of a character."""
    broken = TINY.encode("é")[0]
    decoder = IncrementalDecoder(TINY)
    emitted = [decoder.push(broken) for _ in range(12)]
    assert "�" in "".join(emitted)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": CONVERSATION, "tools": [3]}, "tools"),
        ({"messages": CONVERSATION, "add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"messages": CONVERSATION, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": CONVERSATION, "chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"messages": CONVERSATION, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_malformed_chat_names_its_field(body: dict[str, object], param: str) -> None:
    """An invalid chat body is rejected with the field's name."""
    with pytest.raises(PromptError) as caught:
        chat_prompt(body, TINY)
    assert caught.value.param == param


def test_an_image_is_unsupported_not_malformed() -> None:
    """An image raises UnsupportedPromptError rather than PromptError, so that a router can degrade."""
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(MediaPromptError):
        chat_prompt({"messages": [message]}, TINY)


def test_text_parts_are_joined_for_a_template_that_takes_strings() -> None:
    """Text parts and the joined string have the same ids."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = chat_prompt({"messages": [{"role": "user", "content": "a\nb"}]}, TINY)
    assert np.array_equal(chat_prompt({"messages": [{"role": "user", "content": parts}]}, TINY), joined)


def test_text_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    """A template that iterates over content receives parts even for a plain string."""
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", {}
    )
    assert template.wants_parts
    assert not ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).wants_parts


def test_tool_call_arguments_reach_the_template_as_an_object() -> None:
    """Arguments of tool calls, which are JSON text, reach the template as an object."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, 2]}'}}
    body = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert '{"name": "look", "arguments": {"at": [1, 2]}}' in TINY.decode(chat_prompt(body, TINY))


def test_a_lone_surrogate_in_arguments_is_rejected() -> None:
    """Arguments with an escaped lone surrogate raise UnsupportedPromptError."""
    call = {"function": {"name": "look", "arguments": r'{"at": "\udfff"}'}}
    with pytest.raises(PromptError, match="surrogate"):
        chat_prompt({"messages": [{"role": "assistant", "tool_calls": [call]}]}, TINY)


@pytest.mark.parametrize("body", [{"prompt": "x" * 11}, {"prompt": ["x", "x" * 11]}])
def test_text_above_the_callers_limit_is_rejected(body: dict[str, object]) -> None:
    """A text above the limit is rejected before it is encoded, and the error states its length."""
    with pytest.raises(PromptTooLongError) as caught:
        completion_prompts(body, TINY, PromptLimits(chars_max=10))
    assert caught.value.chars == 11


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), (["ab", "cd"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), ("", 1)]
)
def test_every_form_of_completion_prompt(prompt: object, count: int) -> None:
    """A text, token ids and lists of either are accepted."""
    assert len(completion_prompts({"prompt": prompt}, TINY)) == count


@pytest.mark.parametrize(
    "prompt", [None, [], 3, ["a", 3], [5, "a"], [-1], [4096], [True], [[5], 6], {"a": 1}]
)
def test_an_invalid_completion_prompt_is_rejected(prompt: object) -> None:
    """Any other prompt raises PromptError with the field `prompt`."""
    with pytest.raises(PromptError) as caught:
        completion_prompts({"prompt": prompt}, TINY)
    assert caught.value.param == "prompt"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
message_like = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("user") | json_values,
        "content": st.text(max_size=8) | json_values,
        "tool_calls": json_values,
    },
)


@given(st.lists(message_like | json_values, max_size=4), json_values, json_values)
@settings(max_examples=examples(200))
def test_no_chat_body_raises_anything_but_a_prompt_error(
    messages: object, tools: object, kwargs: object
) -> None:
    """Any body is tokenized or raises PromptError."""
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    try:
        ids = chat_prompt(body, TINY)
    except PromptError:
        return
    assert all(0 <= token_id < TINY.vocab_size for token_id in ids)


def test_a_broken_directory_is_named(tmp_path: Path) -> None:
    """TokenizerLoadError names the missing or broken file."""
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json"):
        PromptTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json"):
        PromptTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text((TINY_DIRECTORY / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(TokenizerLoadError, match="chat template, line 1"):
        PromptTokenizer.from_directory(tmp_path)
