"""Reading token usage from responses while they pass."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.doors.ext_proc_response import UsageReader

USAGE = b'{"id":"x","usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}}'
EVENTS = (
    b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}\n\ndata: ' + USAGE + b"\n\ndata: [DONE]\n\n"
)


def read(body: bytes, cuts: list[int], *, is_event_stream: bool) -> int | None:
    """Read a body split at the given positions and return its cached tokens."""
    reader = UsageReader(is_event_stream=is_event_stream)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        reader.feed(body[start:end])
    reader.end()
    return reader.cached_tokens


@given(st.lists(st.integers(0, 500), max_size=12))
def test_cached_tokens_are_found_wherever_chunks_are_split(cuts: list[int]) -> None:
    """JSON and event streams give the same cached tokens, wherever the chunks are split."""
    assert read(USAGE, cuts, is_event_stream=False) == 7
    assert read(EVENTS, cuts, is_event_stream=True) == 7


@pytest.mark.parametrize(
    "body",
    [b"", b"no healthy upstream", b'{"usage":null}', b'{"usage":{"prompt_tokens":1}}', b"[]"]
    + [
        b'{"usage":{"prompt_tokens_details":{"cached_tokens":%s}}}' % number
        for number in (b"-5", b"1e99", b"99999999999", b'"7"', b"null")
    ],
)
def test_a_response_without_usage_reports_nothing(body: bytes) -> None:
    """Errors, broken JSON and responses without usage report no cached tokens."""
    assert read(body, [], is_event_stream=False) is None
    assert read(b"data: " + body + b"\n", [], is_event_stream=True) is None


def test_an_oversized_body_is_not_read() -> None:
    """A body above the reader's limit is neither buffered nor read."""
    reader = UsageReader(is_event_stream=False)
    for _ in range(40):
        reader.feed(b" " * 65_536)
    reader.feed(USAGE)
    reader.end()
    assert reader.cached_tokens is None


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
def test_any_bytes_are_read_without_error(chunks: list[bytes], is_event_stream: bool) -> None:
    """No body raises an error."""
    reader = UsageReader(is_event_stream=is_event_stream)
    for chunk in chunks:
        reader.feed(chunk)
    reader.end()
    assert reader.cached_tokens is None


def test_anthropic_events_each_report_a_part() -> None:
    """Anthropic reports the prompt's tokens in the first event and the output's in a later one."""
    reader = UsageReader(is_event_stream=True)
    start = {"input_tokens": 25, "cache_read_input_tokens": 16, "output_tokens": 1}
    for event in (
        {"type": "message_start", "message": {"id": "m", "usage": start}},
        {"type": "content_block_delta", "delta": {"text": 'the "usage" of it'}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}},
    ):
        reader.feed(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n")
    reader.end()
    assert (reader.cached_tokens, reader.output_tokens) == (16, 15)
    assert reader.usage_json is not None
    assert json.loads(reader.usage_json) == {
        "input_tokens": 25,
        "cache_read_input_tokens": 16,
        "output_tokens": 15,
    }


@pytest.mark.parametrize("is_event_stream", [False, True])
def test_sglang_reports_usage_in_meta_info(is_event_stream: bool) -> None:
    """SGLang reports usage in meta_info, of a JSON response as of the last event."""
    told = {"text": "x", "meta_info": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 8}}
    reader = UsageReader(is_event_stream=is_event_stream)
    data = json.dumps(told).encode()
    reader.feed(b"data: " + data + b"\n\ndata: [DONE]\n\n" if is_event_stream else data)
    reader.end()
    assert (reader.cached_tokens, reader.output_tokens) == (8, 2)
