"""One rendering of a `LoopForm`: messages and what is known of the first ones in, text in its parts out.

Takes note of what the loop's rounds look at, so that the next rendering can tell whether they would show the
same again; then they are left out. Raises `NotResumable` wherever that is in doubt. Knows no tokens.
"""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, TypeAlias

from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace

from tokenization.idle_rounds import WHILE, while_set
from tokenization.loop_form import BEGIN, COMPARE, END, ITEM, NEXT, WHOLE, Attribute, LoopForm

Message: TypeAlias = Mapping[str, Any]

# No message holds it, as nobody knows it.
_MARK = secrets.token_hex(16)
_ORDERS = {"gt": operator.gt, "gteq": operator.ge, "lt": operator.lt, "lteq": operator.le}
_TURNED = {"gt": "lt", "gteq": "lteq", "lt": "gt", "lteq": "gteq"}
# Of what comes behind the round that asks.
_LATER = frozenset({"last", "length", "revindex", "revindex0", "nextitem"})
_OWN = frozenset({"depth", "depth0"})
_PLAIN = frozenset({str, int, float, bool, type(None)})
_JSON = frozenset({list, dict, tuple})
# A system message and, with some templates, the first question are shown in front of the loop.
_IN_FRONT_MAX = 2
_CHAR_BYTES_MAX = 4


class NotResumable(Exception):  # noqa: N818  (it is no error)
    """Rounds cannot be left out, or not be left out next time."""


class Rounds(NamedTuple):
    """Rounds that need not be shown again, as long as what they looked at is the same.

    Attributes:
        shown: How many, from the first on.
        in_front: Messages that are not among the loop's.
        facts: What they read from outside, and what they may have found in namespaces.
        bounds: Least and greatest numbers with which comparisons come out the same.
        items: Lists that they read by index, and how many items of them count.
        state: What namespaces hold behind them.
    """

    shown: int
    in_front: int
    facts: Mapping[Attribute, object]
    bounds: Mapping[Attribute, tuple[float, float]]
    items: Mapping[str, tuple[Sequence[object], int]]
    state: Mapping[tuple[str, str], object]

    @property
    def size_bytes(self) -> int:
        """Memory that texts in it take, at most."""
        facts = [fact[1] for fact in self.facts.values() if isinstance(fact, tuple)]
        chars = sum(len(text) for text in (*facts, *self.state.values()) if isinstance(text, str))
        return _CHAR_BYTES_MAX * chars


class Shown(NamedTuple):
    """A rendering.

    Attributes:
        before: What stands in front of the loop.
        rounds: What each round shows, without those that were left out.
        behind: What stands behind the loop.
        resumable: The most rounds that may be left out next time; None: none.
        earlier: The most of them, or none, that may also be left out where the last message is another; None:
            not even what stands before them can be told then.
    """

    before: str
    rounds: Sequence[str]
    behind: str
    resumable: Rounds | None
    earlier: Rounds | None


class LoopItems(list[Any]):
    """What the loop runs over, without the rounds that are left out.

    Attributes:
        run: The rendering.
        left_out: How many rounds these are.
        before: The last one's item.
    """

    __slots__ = ("before", "left_out", "run")

    def __init__(self, items: Sequence[Any], run: LoopRun, left_out: int) -> None:
        super().__init__(items[left_out:])
        self.run = run
        self.left_out = left_out
        self.before = items[left_out - 1] if left_out else None

    def place(self, loop: LoopContext, name: str) -> Any:
        """`loop.name` as it were with all rounds."""
        if name in _LATER:
            value = getattr(loop, name)
            # What stands behind a round today stands there tomorrow, too, unless the last message is another.
            self.run.looks_ahead |= value is not False if name == "last" else not isinstance(value, dict)
            if name == "nextitem":
                self.run.seen = max(self.run.seen, self.left_out + loop.index0 + 2)
            return value + self.left_out if name == "length" else value
        if name == "first":
            return not self.left_out and loop.first
        if name == "previtem":
            return self.before if self.left_out and not loop.index0 else loop.previtem
        return getattr(loop, name) + (0 if name in _OWN else self.left_out)


class LoopRun:
    """One rendering.

    Args:
        messages: All of them.
        known: Rounds to be left out.

    Attributes:
        looks_ahead: Whether the round looks at what may change when messages are added.
        seen: How many of the loop's items rounds in front of them look at.
    """

    def __init__(self, form: LoopForm, messages: Sequence[Message], known: Rounds | None) -> None:
        self.looks_ahead = False
        self.seen = 0
        self._form = form
        self._messages = messages
        self._known = known
        self._names: Mapping[str, Any] = {}
        self._in_front = 0
        self._items: LoopItems | None = None
        self._facts: Mapping[Attribute, object] = {}
        self._bounds: dict[Attribute, tuple[float, float]] = {}
        self._counts: dict[str, int] = {}
        self._rounds = -1
        self._resumable: Rounds | None = None
        self._earlier: Rounds | None = None

    def show(self, variables: Mapping[str, Any]) -> Shown:
        """Renders.

        Raises:
            NotResumable: The whole has to be rendered.
            Exception: Whatever the template raises.
        """
        functions: dict[str, object] = {BEGIN: self.begin, NEXT: self.next, END: self.end, WHILE: while_set}
        functions |= {ITEM: self.item, WHOLE: self.whole, COMPARE: self.compare}
        text = self._form.template.render({**variables, **functions})
        before, *rounds, behind = text.split(_MARK)
        return Shown(before, rounds, behind, self._resumable, self._earlier)

    def begin(self, items: object, names: Mapping[str, Any]) -> LoopItems:
        """The loop begins: what it runs over, and values of names from outside."""
        messages = self._messages
        if type(items) is not list or self._items is not None:
            raise NotResumable
        in_front = len(messages) - len(items)
        if not 0 <= in_front <= _IN_FRONT_MAX or not all(map(operator.is_, items, messages[in_front:])):
            raise NotResumable
        self._names, self._in_front = names, in_front
        self._facts = self._read_facts()
        known = self._known
        if known is None:
            self._items = LoopItems(items, self, 0)
            return self._items
        self._check(known)
        self._bounds = dict(known.bounds)
        self._counts = {name: count for name, (_, count) in known.items.items()}
        for (name, attribute), value in known.state.items():
            names[name][attribute] = value
        self._items = LoopItems(items, self, known.shown)
        self._resumable = known
        return self._items

    def next(self) -> str:
        """A round begins."""
        self._end_round()
        return _MARK

    def end(self) -> str:
        """The loop is over."""
        self._end_round()
        return _MARK

    def item(self, name: str, value: Any, key: Any) -> Any:
        """A list's item by its index."""
        if value is self._names.get(name):
            if type(value) is list and type(key) is int and 0 <= key < len(value):
                self._counts[name] = max(self._counts.get(name, 0), key + 1)
            else:
                self.looks_ahead = True
        return self._form.template.environment.getitem(value, key)

    def whole(self, name: str, value: Any, of: Any = None) -> Any:
        """A list, which may be another one with more messages, or a part of one."""
        if (value if of is None else of) is self._names.get(name):
            self.looks_ahead = True
        return value

    def compare(
        self, order: str, name: str, attribute: str | None, is_left: bool, of: Any, left: Any, right: Any
    ) -> bool:
        """Which of two is greater; `of` is the name's value, `left` or `right` that of its attribute."""
        result: bool = _ORDERS[order](left, right)
        number, other = (left, right) if is_left else (right, left)
        if of is self._names.get(name) and (attribute is None or type(of) is Namespace):
            if type(number) is not int or type(other) is not int or type(result) is not bool:
                self.looks_ahead = True
            else:
                low, high = self._bounds.get((name, attribute), (-inf, inf))
                least, most = _bounds(order if is_left else _TURNED[order], other, result)
                self._bounds[name, attribute] = max(low, least), min(high, most)
        return result

    def _at(self) -> int:
        """The round's number, of all."""
        assert self._items is not None
        return self._items.left_out + self._rounds

    def _end_round(self) -> None:
        """What is the same with more messages, up to here; nothing more behind a round that looks ahead."""
        self._rounds += 1
        if self.looks_ahead:
            return
        items = {name: (self._names[name], count) for name, count in self._counts.items()}
        state = {
            key: _plain(self._names[key[0]], key[1]) for key in self._form.written if self._is_outer(key[0])
        }
        rounds = Rounds(self._at(), self._in_front, self._facts, dict(self._bounds), items, state)
        if rounds.shown:
            self._resumable = rounds
        if max(rounds.shown, self.seen) + self._in_front < len(self._messages):
            self._earlier = rounds

    def _is_outer(self, name: str) -> bool:
        return type(self._names[name]) is Namespace

    def _check(self, known: Rounds) -> None:
        """Whether all that the known rounds looked at is the same."""
        if known.in_front != self._in_front or known.facts != self._facts:
            raise NotResumable
        for compared, (least, most) in known.bounds.items():
            number = _value(self._names, compared)
            if type(number) is not int or not least <= number <= most:
                raise NotResumable
        for name, (items, count) in known.items.items():
            now = self._names[name]
            if type(now) is not list or len(now) < count or len(items) < count:
                raise NotResumable
            if not all(map(operator.is_, now[:count], items)):
                raise NotResumable

    def _read_facts(self) -> dict[Attribute, object]:
        form, names = self._form, self._names
        facts: dict[Attribute, object] = {(name, None): _fact(names[name]) for name in form.wholes}
        for name, attributes in form.attributes.items():
            if self._is_outer(name):
                facts |= {
                    (name, attribute): _fact(_plain(names[name], attribute)) for attribute in attributes
                }
            else:
                facts[name, None] = _fact(names[name])
        for name, attribute in form.written:
            if self._is_outer(name):
                facts[name, attribute] = _fact(_plain(names[name], attribute))
        return facts


def _value(names: Mapping[str, Any], compared: Attribute) -> object:
    """What rounds compare; of what is no namespace, the value itself."""
    name, attribute = compared
    value: object = names[name]
    return value if attribute is None or type(value) is not Namespace else _plain(value, attribute)


def _fact(value: Any) -> object:
    """What tells values apart that may be shown differently.

    Raises:
        NotResumable: It is of a kind for which that is not known.
    """
    kind = type(value)
    if kind is float:
        # Zero is shown with its sign, and not a number is equal to nothing.
        return kind, repr(value)
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Undefined):
        return Undefined
    if kind not in _JSON:
        raise NotResumable
    try:
        return kind, json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotResumable from error


def _plain(namespace: Any, attribute: str) -> object:
    """A namespace's value.

    Raises:
        NotResumable: There is none, or it may be changed by others.
    """
    try:
        value: object = getattr(namespace, attribute)
    except AttributeError:
        raise NotResumable from None
    if type(value) not in _PLAIN:
        raise NotResumable
    return value


def _bounds(order: str, other: int, result: bool) -> tuple[float, float]:
    """Least and greatest n for which `n order other` is the result."""
    beside = (order in ("gt", "lt")) == result
    if (order in ("gt", "gteq")) == result:
        return other + beside, inf
    return -inf, other - beside
