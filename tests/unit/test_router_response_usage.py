"""Reading usage out of responses as they pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.response_usage import UsageReader

USAGE = b'{"id":"x","usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}}'
EVENTS = (
    b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}\n\ndata: ' + USAGE + b"\n\ndata: [DONE]\n\n"
)


def read(body: bytes, cuts: list[int], *, is_event_stream: bool) -> int | None:
    """Feeds a body cut at the given places."""
    reader = UsageReader(is_event_stream=is_event_stream)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        reader.feed(body[start:end])
    reader.end()
    return reader.cached_tokens


@given(st.lists(st.integers(0, 500), max_size=12))
def test_cached_tokens_are_found_however_the_body_is_cut(cuts: list[int]) -> None:
    """JSON answers and event streams tell the same, whatever the chunk borders."""
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
def test_a_response_without_usage_tells_nothing(body: bytes) -> None:
    """Errors, broken JSON and missing fields are no news, in either form."""
    assert read(body, [], is_event_stream=False) is None
    assert read(b"data: " + body + b"\n", [], is_event_stream=True) is None


def test_an_oversized_answer_is_let_pass_unread() -> None:
    """What is larger than the reader keeps is not accumulated."""
    reader = UsageReader(is_event_stream=False)
    for _ in range(40):
        reader.feed(b" " * 65_536)
    reader.feed(USAGE)
    reader.end()
    assert reader.cached_tokens is None


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
def test_any_bytes_are_survived(chunks: list[bytes], is_event_stream: bool) -> None:
    """No body raises."""
    reader = UsageReader(is_event_stream=is_event_stream)
    for chunk in chunks:
        reader.feed(chunk)
    reader.end()
    assert reader.cached_tokens is None
