"""model_server.openai.types: JSON bytes become validated fields, or an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from model_server.openai.types import Api, ApiError, decode_body, generation_body


def test_all_fields_may_be_null() -> None:
    """An optional field that is null counts as not given."""
    names = "max_tokens temperature top_p top_k stop stream stream_options seed n user echo logprobs suffix"
    fields = generation_body("completion", dict.fromkeys(names.split()))
    assert (fields.max_tokens, fields.n, fields.stop_strings) == (None, None, ())


def test_unknown_fields_are_ignored() -> None:
    """An unknown field is ignored."""
    assert generation_body("chat", {"best_effort": 3, "vllm_xargs": {"a": 1}, "seed": 5}).seed == 5


@pytest.mark.parametrize(
    ("api", "body", "count"),
    [
        ("completion", {}, None),
        ("completion", {"logprobs": False}, None),
        ("completion", {"logprobs": 0}, 0),
        ("completion", {"logprobs": 5}, 5),
        ("chat", {"logprobs": False, "top_logprobs": 0}, None),
        ("chat", {"logprobs": True}, 0),
        ("chat", {"logprobs": True, "top_logprobs": 7}, 7),
    ],
)
def test_both_apis_count_alternatives(api: Api, body: dict[str, Any], count: int | None) -> None:
    """Log probabilities of completions and chats have different fields; 0 and none differ."""
    assert generation_body(api, body).logprob_count == count


@pytest.mark.parametrize(("stop", "strings"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())])
def test_stop_is_a_string_or_several(stop: Any, strings: tuple[str, ...]) -> None:
    """Both forms of structured outputs are equivalent."""
    assert generation_body("chat", {"stop": stop}).stop_strings == strings


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("prompt_logprobs", None, 0),
        ("bad_words", [], ["x"]),
        ("tool_choice", "auto", "required"),
        ("best_of", 1, 2),
        ("suffix", "", "end"),
    ],
)
def test_unsupported_fields_are_rejected_unless_neutral(name: str, neutral: object, asking: object) -> None:
    """An unsupported field is accepted with its neutral value, and rejected otherwise."""
    generation_body("completion", {name: neutral})
    with pytest.raises(ApiError, match=f"{name} is not supported") as caught:
        generation_body("completion", {name: asking})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"max_tokens": "8"}, "max_tokens: expected `int | null`, got `str`", "max_tokens"),
        ({"temperature": -1}, "temperature: expected `float` >= 0.0", "temperature"),
        ({"frequency_penalty": 2.5}, "frequency_penalty: expected `float` <= 2.0", "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected `float` > 0.0", "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: expected `int` <= 20", "top_logprobs"),
        ({"top_logprobs": 2}, "`logprobs` must be set to true", "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type: invalid enum", "response_format"),
        ({"structured_outputs": {"grammar": "x"}}, "unknown field `grammar`", "structured_outputs"),
        ({"stop": ["a", ""]}, r"stop\[1\]: expected `str` of length >= 1", "stop"),
        (
            {"stream_options": {"include_usage": 1}},
            "stream_options.include_usage: expected",
            "stream_options",
        ),
    ],
)
def test_a_wrong_type_names_the_field(body: dict[str, Any], message: str, param: str) -> None:
    """The message says where in the body what was expected."""
    with pytest.raises(ApiError, match=message) as caught:
        generation_body("chat", body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"nul", b'{"a":\xff}', b"[" * 10_000, b'{"a":1e999}']
)
def test_a_body_must_be_a_json_object(raw: bytes) -> None:
    """Anything but one JSON object is a 400 without a field."""
    with pytest.raises(ApiError) as caught:
        decode_body(raw)
    assert (caught.value.status, caught.value.param) == (400, None)
