"""Parsing of topics and of ranks in batches."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.streams.bound import Topic, batch_rank, parse_topic


@pytest.mark.parametrize(
    ("frame", "pod", "model"),
    [
        (b"kv@10.0.0.1:8000@tiny", "10.0.0.1:8000", "tiny"),
        (b"kv@[fd00::1]:8000@org/model@rev@2", "[fd00::1]:8000", "org/model@rev@2"),
        ("kv@engine-0@größe/模型".encode(), "engine-0", "größe/模型"),
    ],
)
def test_a_topic_is_split_at_its_first_two_signs(frame: bytes, pod: str, model: str) -> None:
    """A model's name may contain any characters."""
    assert parse_topic(frame) == Topic(pod, model)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"kv",
        b"kv@pod",
        b"kv@@m",
        b"kv@pod@",
        b"lv@pod@m",
        b"kv@\xff@m",
        b"kv@a\nb@m",
        b"kv@a#1@m",
        b"kv@" + b"p" * 2000 + b"@m",
    ],
)
def test_a_topic_without_pod_and_model_is_rejected(frame: bytes) -> None:
    """Names of KV cache groups and names that would break a log line are rejected, too."""
    assert parse_topic(frame) is None


@pytest.mark.parametrize(
    ("batch", "rank"),
    [
        ([1.0, []], 0),
        ([1.0, [], None], 0),
        ([1.0, [], 3], 3),
        ([1.0, [], 3, "more"], 3),
        ([1.0, [], -1], 0),
        ([1.0, [], 1 << 20], 0),
        ([1.0, [], "3"], 0),
        ({"ts": 1}, 0),
    ],
)
def test_the_rank_is_the_third_element(batch: object, rank: int) -> None:
    """A batch without a usable rank is of rank 0."""
    assert batch_rank(msgspec.msgpack.encode(batch)) == rank


@given(st.binary())
def test_any_bytes_are_read(data: bytes) -> None:
    """No topic and no payload raises an error."""
    parse_topic(data)
    parse_topic(b"kv@" + data)
    assert 0 <= batch_rank(data) < 1 << 16
