"""Requests that continue conversations, each by a new turn: chats in, request bodies out.

The prefix before the new turn is the same each time, so it is known to router and pods. The turn is English
prose: an assistant message of about 200 characters and a question of about 100.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle
from pydoc_data.topics import topics
from random import Random

ANSWER_CHARS, QUESTION_CHARS = 200, 100
_TURN = b'}, {"role": "assistant", "content": "%b"}, {"role": "user", "content": "%b"}]'
# Distance between successive turns in the prose.
_STRIDE_CHARS = 97


def next_turns(chats: Sequence[bytes], *, seed: int | None = None) -> Iterator[bytes]:
    """Yield the chats in turn without end, each time with a new last turn.

    Args:
        chats: JSON objects whose last list of objects is `messages`.
        seed: Seed of the turns' offset in the prose; None: random.
    """
    text = prose()
    last = len(text) - 2 * (ANSWER_CHARS + QUESTION_CHARS)
    # Processes must start at different places: a repeated turn is not new.
    at = Random(seed).randrange(last)
    for before, _, behind in cycle([chat.rpartition(b"}]") for chat in chats]):
        at = (at + _STRIDE_CHARS) % last
        answer_end = text.index(b" ", at + ANSWER_CHARS)
        question_end = text.index(b" ", answer_end + QUESTION_CHARS)
        turn = _TURN % (text[text.index(b" ", at) + 1 : answer_end], text[answer_end + 1 : question_end])
        yield before + turn + behind


@cache
def prose() -> bytes:
    """Return the words of the Python manual, except those that JSON would escape."""
    words = " ".join(" ".join(topics.values()).split())
    return words.replace("\\", "").replace('"', "'").encode("ascii", "ignore")
