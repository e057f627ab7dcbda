"""Whether a chat template shows a message's content just as it is: a turn's syntax in, how it shows it out.

Of such a template's turns all but the content is the same for all messages of a role, so that a new one needs
no rendering. Counts on the turn being pure, see `turn_form`, and on messages that have a role, a content that
is text and not empty, and nothing else. Renders nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TypeAlias

from jinja2 import nodes

_CONTENT = "content"
# A message is a dict: under these names a template finds what tells all of it.
_METHODS = frozenset(dir(dict))
# Of any text they say the same.
_TYPE_TESTS = frozenset(
    {
        *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence"),
        *("number", "integer", "boolean"),
    }
)

ShownAs: TypeAlias = Callable[[str], str]
"""What is shown of a content: `str` (all of it) or `str.strip`."""


class _Use(Enum):
    """What an expression's value is used for."""

    SHOWN = auto()
    TRUTH = auto()
    OTHER = auto()


def content_form(body: Sequence[nodes.Node], turn: str) -> ShownAs | None:
    """How a loop over messages shows their content; None where that is in doubt.

    Args:
        body: Of the loop.
        turn: The message's name in it.
    """
    uses = _ContentUses(turn)
    if not all(uses.are_plain(node, _Use.OTHER) for node in body):
        return None
    # Nowhere shown, it is shown either way.
    return uses.shown_as.pop() if len(uses.shown_as) == 1 else None if uses.shown_as else str


class _ContentUses:
    """Looks at all places where a turn names its message.

    Attributes:
        shown_as: How its content is shown.
    """

    def __init__(self, turn: str) -> None:
        self.shown_as: set[ShownAs] = set()
        self._turn = turn

    def are_plain(self, node: nodes.Node, use: _Use) -> bool:
        """Whether nothing depends on the content but where it is shown."""
        match node:
            case nodes.Getattr() | nodes.Getitem() if (name := self._field(node)) is not None:
                return self._is_plain_content(use) if name == _CONTENT else name not in _METHODS
            case nodes.Filter(name="trim", node=nodes.Node() as trimmed) if use is _Use.SHOWN:
                if self._field(trimmed) == _CONTENT and not _has_arguments(node):
                    self.shown_as.add(str.strip)
                    return True
            case nodes.Test(node=tested, name=name) if name in _TYPE_TESTS:
                if self._field(tested) == _CONTENT:
                    return True
            case nodes.Test(node=nodes.Name(name=self._turn), name="sameas"):
                # Whether it is the first, which is known.
                return all(self.are_plain(argument, _Use.OTHER) for argument in node.args)
            case nodes.Name(name=self._turn):
                return False
        return all(
            self.are_plain(part, _use(node, name, use))
            for name, value in node.iter_fields()
            for part in (value if isinstance(value, list) else [value])
            if isinstance(part, nodes.Node)
        )

    def _is_plain_content(self, use: _Use) -> bool:
        if use is _Use.SHOWN:
            self.shown_as.add(str)
        return use is not _Use.OTHER

    def _field(self, node: nodes.Node) -> str | None:
        """Which of the message's fields this is; None: none."""
        match node:
            case nodes.Getattr(node=nodes.Name(name=self._turn), attr=str(name)):
                return name
            case nodes.Getitem(node=nodes.Name(name=self._turn), arg=nodes.Const(value=str(name))):
                return name
        return None


def _has_arguments(node: nodes.Filter) -> bool:
    return bool(node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)


def _use(node: nodes.Node, field: str, use: _Use) -> _Use:
    """What a part of a node is used for, where the node is used so."""
    match node:
        case nodes.Output():
            return _Use.SHOWN
        case nodes.Add() | nodes.Concat():
            return _Use.SHOWN if use is _Use.SHOWN else _Use.OTHER
        case nodes.If() | nodes.CondExpr() if field == "test":
            return _Use.TRUTH
        case nodes.CondExpr():
            return use
        case nodes.And() | nodes.Or() | nodes.Not() if use is _Use.TRUTH:
            return _Use.TRUTH
    return _Use.OTHER
