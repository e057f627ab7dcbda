"""What a chat template shows of a conversation, most of its turns from memory: messages in, text out.

The next turn of a long conversation then costs a look at each message, and only its new ones are rendered.
For templates that show each message on its own, see `turn_form`; knows no tokens.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from jinja2 import Environment
from xxhash import xxh3_128_digest

from tokenization.chat_messages import PlainMessage
from tokenization.turn_form import FIRST, MESSAGES, TURNS, TurnForm, turn_form

_CAPACITY_BYTES = 64 << 20
_ENTRY_BYTES = 300
_SETTINGS_MAX = 256
# A client that makes up long ones would have them all kept.
_OPTIONS_MAX, _OPTION_CHARS_MAX = 16, 256
# Values of which equal ones are shown alike, if their types are the same.
_PLAIN_TYPES = (str, int, bool, type(None))
_PLAIN_FORM = ("role", "content")
# Frames by setting and role, which clients make up as they like.
_FRAMES_MAX, _FRAME_CHARS_MAX, _ROLE_CHARS_MAX = 256, 4096, 256

# A setting's number, a role and a content.
_Key: TypeAlias = tuple[int, str, str]
# A number, and what stands in front of the messages and behind them; None: that depends on them.
_Setting: TypeAlias = tuple[int, tuple[str, str] | None]


class Later(NamedTuple):
    """What later messages of a conversation are shown with, whatever they are.

    Attributes:
        number: The setting's.
        behind: What stands behind the last of them.
        variables: The template's.
    """

    number: int
    behind: str
    variables: Mapping[str, Any]


class Turns:
    """Renders with one template; safe to share between threads.

    Args:
        form: The template in its parts.
        mark: What divides the turns.
        capacity_bytes: Most memory for what is remembered.
    """

    def __init__(self, form: TurnForm, mark: str, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._form = form
        self._mark = mark
        self._memory = _Memory(capacity_bytes)
        self._settings: dict[object, _Setting] = {}
        self._numbers = count(1)
        self._frames: dict[tuple[int, str], list[str] | None] = {}
        # Unknown to clients: no content is made to have another's digest.
        self._seed = secrets.randbits(64)

    @classmethod
    def of(cls, environment: Environment, source: str) -> Turns | None:
        """For a template's source; None where it does not show each message on its own."""
        mark = secrets.token_hex(16)
        form = turn_form(environment, source, mark)
        return cls(form, mark) if form is not None else None

    def render(self, variables: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """As the whole template would render; None where that has to be asked.

        Args:
            variables: The template's, `messages` among them.
            options: Those of them that may differ from request to request, without the messages.
        """
        messages = variables[MESSAGES]
        setting = self._setting(variables, options, messages)
        if setting is None:
            return None
        number, ends = setting
        before, behind = self._ends(variables) if ends is None else ends
        keys = _keys(messages, number)
        if keys[0] is not None:
            keys[0] = (~number, *keys[0][1:])
        turns = self._shown(keys, messages, {**variables, FIRST: messages[0]})
        return None if turns is None else "".join((before, *turns, behind))

    def later(
        self, variables: Mapping[str, Any], options: Mapping[str, Any], first: Mapping[str, Any]
    ) -> Later | None:
        """How later messages are shown where `first` is the first; None where that depends on others, too.

        Args:
            variables: The template's, without the messages.
            options: As for `render`.
        """
        is_plain = tuple(first) == _PLAIN_FORM and type(first["content"]) is str
        if not self._form.is_fixed_by_first or not is_plain:
            return None
        variables = {**variables, MESSAGES: [first], FIRST: first}
        setting = self._setting(variables, options, [first])
        if setting is None:
            return None
        number, ends = setting
        _, behind = self._ends(variables) if ends is None else ends
        return Later(number, behind, variables)

    def render_later(self, messages: Sequence[Mapping[str, Any]], shown: Later) -> str | None:
        """What stands in the place of messages behind the first; None where the whole has to be asked."""
        turns = self._shown(_keys(messages, shown.number), messages, shown.variables)
        return None if turns is None else "".join(turns)

    def render_plain(self, messages: Sequence[PlainMessage], shown: Later) -> str | None:
        """As `render_later`, where each message has no more than a role and a text in that role's frame."""
        shown_as = self._form.shown_as
        if shown_as is None:
            return None
        turns = []
        for message in messages:
            frame = self._frame(shown.number, message.role, shown.variables)
            if frame is None or not message.content:
                return None
            turns.append(shown_as(message.content).join(frame))
        return "".join(turns)

    def _shown(
        self,
        keys: Sequence[_Key | None],
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> Sequence[str] | None:
        """Each message's turn: its content in its role's frame, from memory, or rendered."""
        turns = self._memory.get(keys) if self._form.shown_as is None else self._framed(keys, variables)
        missing = [at for at, turn in enumerate(turns) if turn is None]
        if missing:
            given = {**variables, TURNS: [messages[at] for at in missing]}
            *shown, rest = self._form.turns.render(given).split(self._mark)
            if len(shown) != len(missing) or rest:
                return None
            for at, turn in zip(missing, shown, strict=True):
                turns[at] = turn
                self._memory.put(keys[at], turn)
        return turns  # type: ignore[return-value]

    def _framed(self, keys: Sequence[_Key | None], variables: Mapping[str, Any]) -> list[str | None]:
        """Turns that need no rendering, or are remembered; None for others."""
        shown_as = self._form.shown_as
        assert shown_as is not None
        turns: list[str | None] = []
        for key in keys:
            # The first message may be shown otherwise than later ones that are like it.
            if key is not None and key[0] >= 0 and key[2]:
                frame = self._frame(key[0], key[1], variables)
                if frame is not None:
                    turns.append(shown_as(key[2]).join(frame))
                    continue
            turns += self._memory.get((key,))
        return turns

    def _frame(self, number: int, role: str, variables: Mapping[str, Any]) -> list[str] | None:
        """What later turns of a role show around their content; None: too much to be kept."""
        if len(role) > _ROLE_CHARS_MAX:
            return None
        frames, key = self._frames, (number, role)
        if key not in frames:
            # No template knows it, and nothing else looks like it.
            content = secrets.token_hex(16)
            turn = self._form.turns.render({**variables, TURNS: [{"role": role, "content": content}]})
            if len(frames) >= _FRAMES_MAX:
                frames = self._frames = {}
            is_kept = len(turn) <= _FRAME_CHARS_MAX
            frames[key] = turn.removesuffix(self._mark).split(content) if is_kept else None
        return frames[key]

    def _setting(
        self, variables: Mapping[str, Any], options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
    ) -> _Setting | None:
        """What turns depend on beside their message: its number, and both ends where they are fixed."""
        given = options_key(options)
        if given is None:
            return None
        of_first = None
        if self._form.names_first:
            role, content = messages[0].get("role"), messages[0].get("content")
            if tuple(messages[0]) != _PLAIN_FORM or type(content) is not str:
                return None
            if type(role) is not str or len(role) > _ROLE_CHARS_MAX:
                return None
            # A long one is not kept for the sake of telling it apart.
            is_long = len(content) > _OPTION_CHARS_MAX
            of_first = role, xxh3_128_digest(content.encode(), self._seed) if is_long else content
        key = of_first, given
        setting = self._settings.get(key)
        if setting is None:
            ends = self._ends(variables) if self._form.is_fixed else None
            if len(self._settings) >= _SETTINGS_MAX:
                self._settings = {}
            # In one step: two threads that got one number would be shown each other's turns.
            setting = self._settings[key] = (next(self._numbers), ends)
        return setting

    def _ends(self, variables: Mapping[str, Any]) -> tuple[str, str]:
        return self._form.before.render(variables), self._form.behind.render(variables)


def options_key(options: Mapping[str, Any]) -> tuple[object, ...] | None:
    """What tells options apart that may be shown differently; None where that is in doubt, or too long."""
    if len(options) > _OPTIONS_MAX:
        return None
    for name, value in options.items():
        text = value if type(value) is str else ""
        if type(value) not in _PLAIN_TYPES or len(name) + len(text) > _OPTION_CHARS_MAX:
            return None
    # True and 1 are equal and look different.
    return tuple([(name, type(value), value) for name, value in options.items()])


def _keys(messages: Sequence[Mapping[str, Any]], number: int) -> list[_Key | None]:
    return [
        # Only of a message of this form role and content are all that there is, down to the order.
        (number, message["role"], content)
        if tuple(message) == _PLAIN_FORM and type(content := message["content"]) is str
        else None
        for message in messages
    ]


class _Memory:
    """Turns by their keys. What was not asked for while half the bytes were used up is forgotten."""

    def __init__(self, capacity_bytes: int) -> None:
        self._half_bytes = capacity_bytes // 2
        self._used_bytes = 0
        self._young: dict[_Key, str] = {}
        self._old: dict[_Key, str] = {}
        self._lock = threading.Lock()

    def get(self, keys: Sequence[_Key | None]) -> list[str | None]:
        """What is remembered; None for what is not."""
        turns: list[str | None] = list(map(self._young.get, keys))  # type: ignore[arg-type]
        if self._old and None in turns:
            old = self._old
            for at, key in enumerate(keys):
                if turns[at] is None and key is not None and (turn := old.get(key)) is not None:
                    turns[at] = turn
                    self.put(key, turn)
        return turns

    def put(self, key: _Key | None, turn: str) -> None:
        """Remembers a turn; None: one that has no key."""
        if key is None:
            return
        size_bytes = sum(map(sys.getsizeof, (turn, *key[1:]))) + _ENTRY_BYTES
        with self._lock:
            if key in self._young or size_bytes > self._half_bytes:
                return
            if self._used_bytes + size_bytes > self._half_bytes:
                self._old, self._young, self._used_bytes = self._young, {}, 0
            self._young[key] = turn
            self._used_bytes += size_bytes
