"""Parsing of client requests: API, fields, and rejected bodies."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.prompts.parsers import OWN_PARSERS
from router.prompts.request import RequestKind, too_large

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", RequestKind.CHAT),
        ("/v1/completions", RequestKind.COMPLETIONS),
        ("/prefix/v1/chat/completions?a=/v1/completions", RequestKind.CHAT),
        ("/v1/completions/", RequestKind.COMPLETIONS),
        ("/v1/xcompletions", RequestKind.PASSTHROUGH),
        ("/v1/completions/render", RequestKind.PASSTHROUGH),
        ("/v1/messages", RequestKind.MESSAGES),
        ("/v1/messages/count_tokens", RequestKind.PASSTHROUGH),
        ("/rooms/messages", RequestKind.PASSTHROUGH),
        ("/openai/v1/responses?x=1", RequestKind.RESPONSES),
        ("/v1/models", RequestKind.PASSTHROUGH),
        ("", RequestKind.PASSTHROUGH),
    ],
)
def test_the_longest_path_suffix_selects_the_api(path: str, kind: RequestKind) -> None:
    """The API is selected by whole trailing path segments, without query and trailing slash."""
    assert OWN_PARSERS.parse("id", path, b'{"model":"m"}')[0].kind is kind


def test_routing_fields_are_read_exactly() -> None:
    """Model, salt and size are read, and integers above 2**53 keep their value."""
    body = b'{"model":"m","prompt":"p","stream":true,"cache_salt":"s","seed":9007199254740993}'
    request = OWN_PARSERS.parse("id", "/v1/completions", body)[0]
    assert (request.model, request.cache_salt) == ("m", "s")
    assert (request.body["seed"], request.body_bytes) == (2**53 + 1, len(body))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b'{"model":"\xff"}', None),
        (b'{"model":"m","x":1e999}', None),
        (b"[" * 100_000, None),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b"{}", "model"),
        (b'{"model":null}', "model"),
        (b'{"model":""}', "model"),
        (b'{"model":["m"]}', "model"),
        (b'{"model":"m","stream":"yes"}', "stream"),
        (b'{"model":"m","cache_salt":7}', "cache_salt"),
        (b'{"model":"m","cache_salt":""}', "cache_salt"),
    ],
)
def test_malformed_bodies_get_an_openai_error(body: bytes, param: str | None) -> None:
    """An invalid body gives an OpenAI-shaped error with status 400 that names the field."""
    with pytest.raises(RequestError) as caught:
        OWN_PARSERS.parse("id", "/v1/chat/completions", body)[0]
    answer = msgspec.json.decode(caught.value.body())["error"]
    assert (caught.value.status, answer["param"], answer["code"]) == (400, param, 400)
    assert answer["type"] == "BadRequestError"
    assert answer["message"]


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_hostile_bodies_raise_only_request_errors(body: bytes) -> None:
    """Any bytes give a request with a model or raise RequestError."""
    refusal = None
    try:
        request = OWN_PARSERS.parse("id", "/v1/chat/completions", body)[0]
    except RequestError as error:
        refusal = error
    if refusal is None:
        assert request.model
    else:
        assert refusal.status == 400
        assert json.loads(refusal.body())


@given(st.binary(max_size=200))
def test_unknown_paths_are_not_parsed(body: bytes) -> None:
    """A request of an unknown API passes whatever its body is."""
    request = OWN_PARSERS.parse("id", "/tokenize", body)[0]
    assert (request.kind, request.model, request.body_bytes) == (RequestKind.PASSTHROUGH, None, len(body))


def test_a_body_above_the_limit_is_a_413() -> None:
    """The error for a body above the limit has status 413 and names the limit."""
    error = too_large(10)
    assert error.status == 413
    assert "10 bytes" in json.loads(error.body())["error"]["message"]
