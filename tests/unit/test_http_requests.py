"""router.http_requests: the headers of a request as texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.http_requests import HttpRequest, RequestReader

# What may stand in a header's value, without the white space around it that is not part of it.
VALUES = st.binary(max_size=20).map(lambda value: value.translate(None, bytes([*range(32), 127])).strip())


def read(head: bytes, behind: bytes = b"") -> HttpRequest:
    """The one request of a connection."""
    reader = RequestReader(1000)
    return reader.feed(b"POST / HTTP/1.1\r\n" + head + b"\r\n" + behind).popleft()


@given(st.lists(VALUES, max_size=8))
def test_each_value_is_read_by_itself(values: list[bytes]) -> None:
    """Bytes that are no UTF-8 are replaced where they stand, and change no other header."""
    head = b"".join(b"X-%d: %b\r\n" % (at, value) for at, value in enumerate(values))
    told = read(head).headers
    assert told == {f"x-{at}": value.decode("utf-8", "replace") for at, value in enumerate(values)}


def test_the_last_of_several_wins() -> None:
    """Of headers of one name, however it is spelt, the last counts."""
    assert read(b"a: 1\r\nb: 2\r\nA: 3\r\n").headers == {"a": "3", "b": "2"}


def test_trailers_are_not_read() -> None:
    """What follows a body in parts is no header of its request, nor of the next one."""
    reader = RequestReader(1000)
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nlate: 1\r\n\r\n"
    first, second = reader.feed(chunked + b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert first.headers == {"transfer-encoding": "chunked"}
    assert second.headers == {"host": "a"}
