"""Forbidden body fields: hostile spellings, removal, and bodies that cannot be checked."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.doors.boundary import GATEWAY_ONLY_FIELDS, BodyGuard
from router.errors import RequestError
from router.prompts.parsers import OWN_PARSERS
from tests.support.depth import examples

PARAMS = {"do_remote_prefill": True, "remote_block_ids": []}
CONTAINERS = ("vllm_xargs", "sampling_params", "extra_args", "extra_body", "nvext")
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/tokenize",
)
BASE: dict[str, Any] = {"model": "m", "prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}


def outcome(body: bytes, path: str, *, has_connector: bool = False, content_type: str = "") -> str:
    """Return the path of a body's forbidden field, "refused" or "passes"."""
    guard = BodyGuard(has_connector=lambda: has_connector)
    try:
        request = OWN_PARSERS.parse("r", path, body, headers={"content-type": content_type})[0]
        return guard.forbidden(request, body) or "passes"
    except RequestError as error:
        return "refused" if error.status == 400 else f"status {error.status}"


def carries(value: Any) -> bool:
    """Return whether an engine that reads this object would find a forbidden field."""
    if not isinstance(value, dict):
        return False
    if any(value.get(name) is not None for name in GATEWAY_ONLY_FIELDS):
        return True
    inner = [value[name] for name in CONTAINERS if name in value]
    return any(carries(one) for each in inner for one in (each if isinstance(each, list) else [each]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", GATEWAY_ONLY_FIELDS)
def test_each_field_is_found_on_each_path(path: str, field: str) -> None:
    """A forbidden field is found at the top level of every API's body, known or unknown."""
    assert outcome(json.dumps({**BASE, field: PARAMS}).encode(), path) == field


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        (
            {"sampling_params": {"extra_args": {"ec_transfer_params": PARAMS}}},
            "sampling_params.extra_args.ec_transfer_params",
        ),
        ({"sampling_params": [{}, {"extra_args": {"kv_hints": 1}}]}, "sampling_params.extra_args.kv_hints"),
        ({"extra_body": {"vllm_xargs": {"kv_hints": [1]}}}, "extra_body.vllm_xargs.kv_hints"),
        ({"nvext": {"backend_instance_id": 7}}, "nvext.backend_instance_id"),
        ({"bootstrap_room": 0}, "bootstrap_room"),
    ],
)
def test_nested_fields_are_found(path: str, extra: dict[str, Any], found: str) -> None:
    """A forbidden field is found inside the objects from which engines read further parameters."""
    assert outcome(json.dumps({**BASE, **extra}).encode(), path) == found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "spelling",
    [
        rb'"kv_transfer\u005fparams": {}',
        rb'"\u006b\u0076_transfer_params": {}',
        b'"kv_transfer_params": {}, "kv_transfer_params": {"do_remote_decode": true}',
        b'"kv_transfer_params": null, "kv_transfer_params": {}',
        b'\t"kv_transfer_params"\r\n:\n{}',
        b'"vllm_xargs": {}, "vllm_xargs": {"kv_transfer_params": 1}',
        rb'"vllm\u005fxargs": {"kv_transfer\u005Fparams": 1}',
        b'"x": NaN, "kv_transfer_params": {}',
        b'"x": Infinity, "vllm_xargs": {"kv_transfer_params": -Infinity}',
        rb'"x": "\ud800", "kv_transfer_params": {}',
        b'"x": 1e999, "kv_transfer_params": {}',
    ],
)
def test_no_spelling_passes(path: str, spelling: bytes) -> None:
    """Escapes, duplicate keys, white space and lenient JSON do not hide a forbidden field."""
    body = json.dumps(BASE).encode()[:-1] + b", " + spelling + b"}"
    assert outcome(body, path) != "passes"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (b"", "utf-16-le"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (b"", "utf-32-be"),
    ],
)
def test_no_encoding_passes(path: str, mark: bytes, encoding: str) -> None:
    """A forbidden field is found in every encoding that Python's JSON reader detects."""
    body = mark + json.dumps({**BASE, "kv_transfer_params": PARAMS}).encode(encoding)
    assert outcome(body, path) == "refused"


@pytest.mark.parametrize("path", PATHS)
def test_a_deeply_nested_body_is_rejected(path: str) -> None:
    """A body that is nested more deeply than the router reads is rejected."""
    deep = b'{"model": "m", "x": ' + b"[" * 5000 + b"]" * 5000 + b', "kv_transfer_params": {}}'
    assert outcome(deep, path) == "refused"
    nested = b'{"model": "m", "extra_args": ' * 900 + b'{"kv_hints": 1}' + b"}" * 900
    assert outcome(nested, path) != "passes"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "extra",
    [
        {"kv_transfer_params": None},
        {"tools": [{"function": {"parameters": {"properties": {"data_parallel_rank": {}}}}}]},
        {"metadata": {"kv_hints": "a user's own"}},
        {"vllm_xargs": {"session_id": "kv_hints"}},
        {"KV_TRANSFER_PARAMS": {}, "kv_transfer_params ": {}},
        {"sampling_params": {"temperature": 0}},
    ],
)
def test_harmless_fields_pass(path: str, extra: dict[str, Any]) -> None:
    """Null values, other names and names inside of content are ignored."""
    assert outcome(json.dumps({**BASE, **extra}).encode(), path) == "passes"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"--b\r\ncontent-disposition: form-data; name=vllm_xargs\r\n\r\n{}\r\n--b--", "multipart/form-data"),
        (b"\0\0\0\0\x02\x08\x01", "application/grpc"),
        (b"vllm_xargs=%7B%7D", "text/plain"),
        (b'{"x": "&vllm_xargs={}&"}', "application/x-www-form-urlencoded"),
        (b'{"model": "m"', "application/json"),
    ],
)
def test_unreadable_bodies_pass_only_without_a_connector(body: bytes, content_type: str) -> None:
    """Forms, protobuf and invalid JSON are rejected only if engines have a KV connector."""
    path = "/v1/audio/transcriptions"
    assert outcome(body, path, content_type=content_type) == "passes"
    assert outcome(body, path, content_type=content_type, has_connector=True) == "refused"


def test_readable_bodies_pass_with_a_connector() -> None:
    """With a KV connector, bodies that can be checked still pass, of any JSON type and empty ones too."""
    for body in (b"", b"[]", b'"text"', b"1", b"{}", b'{"input": [1, 2]}'):
        assert outcome(body, "/v1/embeddings", has_connector=True) == "passes"


def test_removal_keeps_other_values_unchanged() -> None:
    """Large numbers, order, escapes and other fields survive the removal of a forbidden field."""
    body = (
        rb'{"model": "m", "seed": 123456789012345678901234567890, "kv_transfer\u005fparams": {"a": [1]},'
        rb' "temperature": 0.10, "prompt": "\u00e9\n", "vllm_xargs": {"kv_hints": 1, "session_id": 1.50},'
        rb' "sampling_params": [{"extra_args": {"kv_hints": 1}, "top_p": 1e-2}, 7], "bootstrap_port": null}'
    )
    assert BodyGuard().without(body) == (
        rb'{"model":"m","seed":123456789012345678901234567890,"temperature":0.10,"prompt":"\u00e9\n",'
        rb'"vllm_xargs":{"session_id":1.50},"sampling_params":[{"extra_args":{},"top_p":1e-2},7]}'
    )


def test_the_list_can_be_changed() -> None:
    """Configured names replace the default ones; an empty list disables the check."""
    body = json.dumps({**BASE, "kv_hints": 1, "priority": 3}).encode()
    request = OWN_PARSERS.parse("r", "/v1/completions", body)[0]
    assert BodyGuard(["priority"]).forbidden(request, body) == "priority"
    assert "kv_hints" in json.loads(BodyGuard(["priority"]).without(body))
    off = BodyGuard([], has_connector=lambda: True)
    assert off.forbidden(request, body) is None
    off.unchecked()


class Pairs(list[Any]):
    """Members of a JSON object, which may repeat a name."""


_NAMES = st.sampled_from([*GATEWAY_ONLY_FIELDS[:3], *CONTAINERS, "model", "prompt", "x"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(),
    lambda inner: st.lists(inner, max_size=2) | st.lists(st.tuples(_NAMES, inner), max_size=3).map(Pairs),
    max_leaves=8,
)


def spelt(value: Any, draw: st.DataObject) -> str:
    """Return JSON of a value with drawn escapes and white space."""
    space = draw.draw(st.sampled_from(["", "", " ", "\n\t"]))
    if isinstance(value, Pairs):
        members = (f"{_name(name, draw)}{space}:{spelt(inner, draw)}" for name, inner in value)
        return "{" + space + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(spelt(inner, draw) for inner in value) + space + "]"
    return json.dumps(value)


def _name(name: str, draw: st.DataObject) -> str:
    at = draw.draw(st.integers(-1, len(name) - 1))
    return '"' + (name if at < 0 else f"{name[:at]}\\u{ord(name[at]):04x}{name[at + 1 :]}") + '"'


@settings(deadline=None, max_examples=examples(300))
@given(
    members=st.lists(st.tuples(_NAMES, _VALUES), max_size=4).map(Pairs),
    path=st.sampled_from(PATHS),
    encoding=st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16"]),
    draw=st.data(),
)
def test_any_field_that_python_reads_is_found(
    members: Pairs, path: str, encoding: str, draw: st.DataObject
) -> None:
    """A forbidden field that Python's JSON reader finds is found or rejected; after removal none is left."""
    body = spelt(members, draw).encode(encoding)
    read = json.loads(body)
    told = outcome(body, path)
    if carries(read):
        assert told != "passes"
    elif told not in ("passes", "refused"):
        raise AssertionError(f"{told} found in {body!r}")
    if told not in ("passes", "refused"):
        assert not carries(json.loads(BodyGuard().without(body)))
