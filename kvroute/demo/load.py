"""Requests of the demonstration, the same for each policy: conversations, tool loops and two bursts.

A wave of requests is sent at once. The texts are meaningless and seeded.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

Message = dict[str, Any]

CONVERSATIONS, TOOL_LOOPS, BURST, NEW = "conversations", "tool loops", "burst", "new requests"

_SYSTEM_PROMPT = """You are the assistant of a team that runs language models for many users. You answer
in short sentences, you name the number behind every claim, and you say so when you do not know. Read the
report, name its cause in one word (network, disk, memory, code, people), then quote the line which shows it.
Do not use anything but the report. When two causes fit, take the earlier one; when none fits, say so. The
reports come from machines and from people, they are not always in order, and some repeat what others said."""

QUESTIONS = (
    "A user says that the first answer of the day is slow and the others are fast. What happens there?",
    "And why does the second question of that conversation wait less than the first, although it is longer?",
    "Suppose the server that holds the conversation is restarted meanwhile. What will the router do then?",
    "What would have happened with a balancer that sends each request to the next server in turn?",
    "Write down, in one sentence, what the team should watch from now on.",
)

_AGENT_PROMPT = """You look for the cause of an incident. Read one report after the other with the tool, until
one line explains all others. Then answer with that line, and with nothing else."""
_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "read_report",
            "description": "Return the text of a report.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    },
)

_WHO = "the first server|the database|a user in Graz|the night shift|the scheduler|node seven|the cache"
_DID = "reported|lost|restarted|waited for|refused|copied|could not find|filled|dropped"
_WHAT = "its disk|a packet|the lock|forty requests|the old key|its memory|the backup|a page|the lease"
_WHEN = "at once|after two minutes|again|for an hour|before the update|during the copy|until noon"
# Lengths in sentences of about 13 tokens. Reports of new requests differ in length, as work does.
_NEW_SENTENCES = (12, 24, 48)
_TOOL_SENTENCES = 25


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of the load: three pods of 1,024 blocks hold all texts, one holds half of them."""

    rounds: int = 2
    conversations: int = 12
    tool_loops: int = 3
    new_requests: int = 12
    turns: int = 3  # of conversations, without the burst; below the number of questions
    steps: int = 5  # of tool loops
    text_sentences: int = 100
    at_once: int = 3  # requests of a wave that is no burst


SMALL_LOAD = Load(
    rounds=1, conversations=4, tool_loops=1, new_requests=3, turns=2, steps=3, text_sentences=60, at_once=2
)
"""For models that compute far more slowly than the built-in one."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Conversation, tool loop or single request: what is said beside the model's answers."""

    name: str
    turns: Sequence[Sequence[Message]]  # messages added before each request
    tools: Sequence[Message] = ()

    def answer(self, turn: int, text: str) -> Message:
        """Return the message of the model's answer; in a tool loop it calls the tool."""
        if not self.tools:
            return {"role": "assistant", "content": text}
        call = {"name": "read_report", "arguments": f'{{"number": {turn}}}'}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        return {"role": "assistant", "content": text, "tool_calls": calls}


class Ask(NamedTuple):
    """One request: the next turn of a session."""

    part: str  # of the report
    session: Session
    turn: int  # from 0


def waves(load: Load, seed: int) -> list[list[Ask]]:
    """Return a round's requests. Rounds of different seeds share system prompts only."""
    shuffle = random.Random(seed).shuffle
    first = 1000 * seed
    texts = range(first, first + load.conversations)
    talks = [conversation(number, load.text_sentences) for number in texts]
    loops = [_tool_loop(first + 100 * number, load.steps) for number in range(1, load.tool_loops + 1)]
    new = [
        Session(f"new {number + 1}", [new_messages(first + 500 + number)])
        for number in range(load.new_requests)
    ]
    # Waves with their places in the round, from 0 to 1.
    placed: list[tuple[float, list[Ask]]] = []
    # In a fixed order, round-robin would meet each conversation's pod by chance.
    for turn in range(load.turns):
        shuffle(talks)
        for at in range(0, len(talks), load.at_once):
            wave = [Ask(CONVERSATIONS, talk, turn) for talk in talks[at : at + load.at_once]]
            placed.append(((turn + at / len(talks)) / load.turns, wave))
    for step in range(load.steps):
        shuffle(loops)
        placed.append(((step + 0.5) / load.steps, [Ask(TOOL_LOOPS, loop, step) for loop in loops]))
    placed.sort(key=itemgetter(0))
    shuffle(talks)
    bursts = [[Ask(BURST, talk, load.turns) for talk in talks], [Ask(NEW, one, 0) for one in new]]
    return [wave for _, wave in placed] + bursts


def conversation(number: int, sentences: int) -> Session:
    """Return a conversation of all questions about the text `number`."""
    opening = {"role": "system", "content": f"{_SYSTEM_PROMPT}\n\n{_report(number, sentences)}"}
    questions = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return Session(f"chat {number % 1000 + 1}", [[opening, *questions[0]], *questions[1:]])


def new_messages(number: int) -> list[Message]:
    """Return the messages of a new request: the common system prompt and the report `number`."""
    sentences = random.Random(number).choice(_NEW_SENTENCES)
    return [
        {"role": "system", "content": _SYSTEM_PROMPT},
        {"role": "user", "content": _report(number, sentences)},
    ]


def _tool_loop(number: int, steps: int) -> Session:
    opening = [
        {"role": "system", "content": _AGENT_PROMPT},
        {"role": "user", "content": f"What caused incident {number}?"},
    ]
    results = [
        [{"role": "tool", "tool_call_id": f"call_{step}", "content": _report(number + step, _TOOL_SENTENCES)}]
        for step in range(steps - 1)
    ]
    return Session(f"loop {number % 1000 // 100}", [opening, *results], _TOOLS)


def _report(number: int, sentences: int) -> str:
    choose = random.Random(number).choice
    words = [texts.split("|") for texts in (_WHO, _DID, _WHAT, _WHEN)]
    lines = [f"{' '.join(map(choose, words))}." for _ in range(sentences)]
    return f"Report {number}. " + " ".join(lines)
