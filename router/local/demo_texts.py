"""What the demonstration says to the model: fixed texts, and documents made from a number.

The model's answers mean nothing (its weights are random); only lengths and shared beginnings matter here.
"""

from __future__ import annotations

import random

_SYSTEM_PROMPT = """You are the assistant of a team that runs language models for many users. You answer
in short sentences, you name the number behind every claim, and you say so when you do not know. The
team runs several model servers. Each keeps the keys and values of the tokens it has seen, in blocks of
sixteen tokens, until memory is needed for something newer. A request whose beginning a server has seen
before needs no work for that beginning, so it matters which server gets which request. A server that is
busy makes every request wait, so it matters as well how much work each one has. The router in front of
them weighs both, in seconds, and sends each request where its first token will come first. When someone
asks about a request, tell which server took it, how many of its tokens were found there, and what the
other servers would have cost. Never guess what a server holds: ask the index, which follows the
servers' own events, and say when its view is not exact."""

QUESTIONS = (
    "A user says that the first answer of the day is slow and the others are fast. What happens there?",
    "And why does the second question of that conversation wait less than the first, although it is longer?",
    "Suppose the server that holds the conversation is restarted meanwhile. What will the router do then?",
    "What would have happened with a balancer that sends each request to the next server in turn?",
    "Write down, in one sentence, what the team should watch from now on.",
)

_BURST_PROMPT = """You sort incident reports. Read the report, then answer with one word for its cause
(network, disk, memory, code, people) and one sentence that quotes the line which shows it. Do not use
anything but the report. When two causes fit, take the earlier one; when none fits, say so. The reports
come from machines and from people, they are not always in order, and some lines repeat what others said
before."""

_WHO = (
    "the first server",
    "the database",
    "a user in Graz",
    "the night shift",
    "the scheduler",
    "node seven",
    "the cache",
)
_DID = (
    "reported",
    "lost",
    "restarted",
    "waited for",
    "refused",
    "copied",
    "could not find",
    "filled",
    "dropped",
)
_WHAT = (
    "its disk",
    "a packet",
    "the lock",
    "forty requests",
    "the old key",
    "its memory",
    "the backup",
    "a page",
    "the lease",
)
_WHEN = (
    "at once",
    "after two minutes",
    "again",
    "for an hour",
    "before the update",
    "during the copy",
    "until noon",
)
# A sentence is about 13 tokens. Reports of a burst differ in length, as work does.
_BURST_SENTENCES = (18, 36, 72)
_CONVERSATION_SENTENCES = 110


def first_messages() -> list[dict[str, str]]:
    """How the conversation begins: what the assistant is to do, and the long report that it is about."""
    return [{"role": "system", "content": f"{_SYSTEM_PROMPT}\n\n{_report(0, _CONVERSATION_SENTENCES)}"}]


def burst_messages(number: int) -> list[dict[str, str]]:
    """Messages of the burst's request `number`: one system prompt for all, a report of its own."""
    return [
        {"role": "system", "content": _BURST_PROMPT},
        {"role": "user", "content": _report(number, _BURST_SENTENCES[number % len(_BURST_SENTENCES)])},
    ]


def _report(number: int, sentences: int) -> str:
    choose = random.Random(number).choice
    lines = [f"{choose(_WHO)} {choose(_DID)} {choose(_WHAT)} {choose(_WHEN)}." for _ in range(sentences)]
    return f"Report {number}. " + " ".join(lines)
