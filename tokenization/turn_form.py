"""Whether a chat template shows each message on its own: its source in, three templates or None out.

Such a template is one loop over the messages between two ends. What the loop shows of a message depends on
that message, on whether it is the first, and on variables that are the same for all. What is not surely so is
refused: only constructs that are known to be pure are let through. Renders nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import Environment, Template, nodes
from jinja2.visitor import NodeTransformer

from tokenization.content_form import ShownAs, content_form

MESSAGES, TURNS, FIRST = "messages", "kvroute_turns", "kvroute_first"
"""Variables: all messages as the template names them, those to be shown, and the first of all."""

_LOOP = "loop"
PURE_NODES = (
    *(
        nodes.Output,
        nodes.TemplateData,
        nodes.Const,
        nodes.If,
        nodes.CondExpr,
        nodes.And,
        nodes.Or,
        nodes.Not,
    ),
    *(nodes.Compare, nodes.Operand, nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.Concat, nodes.Neg),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Slice, nodes.Scope, nodes.Keyword),
    *(
        nodes.Getattr,
        nodes.Getitem,
        nodes.Name,
        nodes.Filter,
        nodes.Test,
        nodes.Call,
        nodes.For,
        nodes.Assign,
    ),
)
PURE_FILTERS = frozenset(
    {
        "trim",
        "upper",
        "lower",
        "capitalize",
        "title",
        "tojson",
        "length",
        "count",
        "string",
        "join",
        "replace",
        "default",
        "d",
        "int",
        "first",
        "last",
        "list",
        "items",
        "indent",
    }
)
PURE_TESTS = frozenset(
    {
        "defined",
        "undefined",
        "none",
        "string",
        "mapping",
        "iterable",
        "sequence",
        "number",
        "integer",
        "boolean",
        "true",
        "false",
        "sameas",
        "equalto",
        "eq",
        "ne",
        "in",
        "==",
        "!=",
    }
)
# One raises, so that nothing is remembered; the other counts.
_PURE_FUNCTIONS = frozenset({"raise_exception", "range"})


@dataclass(frozen=True, slots=True)
class TurnForm:
    """A template in three parts.

    Attributes:
        before: What it shows in front of the messages.
        turns: What it shows of the messages in TURNS, each followed by the mark.
        behind: What it shows behind the messages.
        is_fixed: Whether both ends are the same for all messages.
        is_fixed_by_first: Whether they are the same for all messages that begin with the same one.
        names_first: Whether turns depend on the first message's content.
        shown_as: How turns show their content, see `content_form`; None where that is in doubt.
    """

    before: Template
    turns: Template
    behind: Template
    is_fixed: bool
    is_fixed_by_first: bool
    names_first: bool
    shown_as: ShownAs | None


def turn_form(environment: Environment, source: str, mark: str) -> TurnForm | None:
    """Takes a template apart; None where that might show anything else than the whole.

    Args:
        mark: Text that no message holds.
    """
    body = environment.parse(source).body
    loops = [at for at, node in enumerate(body) if isinstance(node, nodes.For)]
    loop = body[loops[0]] if len(loops) == 1 else None
    if not isinstance(loop, nodes.For) or not _is_plain_loop(loop):
        return None
    before, behind = body[: loops[0]], body[loops[0] + 1 :]
    uses, ends = _Uses(), _Uses()
    if not uses.are_pure(loop.body, in_loop=True) or not ends.are_pure([*before, *behind], in_loop=False):
        return None
    if ends.assigns:
        # The parts would not see each other's variables.
        return None
    assert isinstance(loop.target, nodes.Name)
    shown_as = content_form(loop.body, loop.target.name)
    rewritten = [_FirstByName(loop.target).visit(node) for node in loop.body]
    marked = [*rewritten, nodes.Output([nodes.TemplateData(mark)])]
    turns = nodes.For(loop.target, nodes.Name(TURNS, "load"), marked, [], None, False)
    parts = [_template(environment, part) for part in (before, [turns], behind)]
    is_fixed = not (ends.names_first or ends.names_others)
    is_fixed_by_first = not ends.names_others
    return TurnForm(parts[0], parts[1], parts[2], is_fixed, is_fixed_by_first, uses.names_first, shown_as)


def _is_plain_loop(loop: nodes.For) -> bool:
    over_messages = isinstance(loop.iter, nodes.Name) and loop.iter.name == MESSAGES
    named = isinstance(loop.target, nodes.Name) and loop.target.name not in (MESSAGES, _LOOP)
    return over_messages and named and not loop.else_ and loop.test is None and not loop.recursive


def _template(environment: Environment, body: Sequence[nodes.Node]) -> Template:
    tree = nodes.Template(list(body), lineno=1)
    tree.set_environment(environment)
    template = environment.from_string(tree)
    # As for the whole template: Jinja's chain of maps is slow to copy.
    template.globals = dict(template.globals)
    return template


class _Uses:
    """What a part of a template makes use of.

    Attributes:
        assigns: Whether it sets a variable.
        names_first: Whether it looks at the first message by its place.
        names_others: Whether it looks at messages by other ways.
    """

    def __init__(self) -> None:
        self.assigns = False
        self.names_first = self.names_others = False

    def are_pure(self, body: Sequence[nodes.Node], *, in_loop: bool) -> bool:
        """Whether what is shown depends on variables alone, and inside the loop on no other turn."""
        return all(self._is_pure(node, in_loop, loop_is_own=not in_loop) for node in body)

    def _is_pure(self, node: nodes.Node, in_loop: bool, loop_is_own: bool) -> bool:
        if not isinstance(node, PURE_NODES):
            return False
        match node:
            case nodes.Assign():
                self.assigns = True
                if not isinstance(node.target, nodes.Name):
                    return False
            case nodes.Filter() if node.name not in PURE_FILTERS or node.node is None:
                return False
            case nodes.Test() if node.name not in PURE_TESTS:
                return False
            case nodes.Call() if isinstance(node.node, nodes.Name):
                if node.node.name not in _PURE_FUNCTIONS:
                    return False
            case nodes.Name(name=name, ctx="store") if name in (MESSAGES, _LOOP):
                return False
            case nodes.Getattr(node=nodes.Name(name=name), attr="first") if name == _LOOP:
                return True
            case nodes.Test(
                node=tested, name="sameas", args=[place], kwargs=[], dyn_args=None, dyn_kwargs=None
            ) if _is_first(place):
                # That tells whether it is the first, and nothing of what the first says.
                return self._is_pure(tested, in_loop, loop_is_own)
            case nodes.Getitem() if _is_first(node):
                self.names_first = True
                return True
            case nodes.Name(name="self" | "super" | "caller"):
                # What these show names the template or calls back into it.
                return False
            case nodes.Name(name=name) if name == MESSAGES:
                self.names_others = True
                return not in_loop
            case nodes.Name(name=name) if name == _LOOP:
                return loop_is_own
        return all(self._is_pure(part, in_loop, own) for part, own in _parts(node, loop_is_own))


def _is_first(node: nodes.Node) -> bool:
    """Whether it is the first message by its place."""
    match node:
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=0)):
            return bool(name == MESSAGES)
    return False


def _parts(node: nodes.Node, loop_is_own: bool) -> Iterator[tuple[nodes.Node, bool]]:
    """The parts of a node, and whether `loop` means a loop within the turn there."""
    for name, value in node.iter_fields():
        within = loop_is_own or (isinstance(node, nodes.For) and name == "body")
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, nodes.Node):
                yield part, within


class _FirstByName(NodeTransformer):
    """Has `loop.first` of the messages' loop ask for the first message itself: turns are shown apart."""

    def __init__(self, target: nodes.Node) -> None:
        assert isinstance(target, nodes.Name)
        self._turn = target.name

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802 (the name is Jinja's)
        """`loop.first`."""
        if isinstance(node.node, nodes.Name) and node.node.name == _LOOP and node.attr == "first":
            turn, first = nodes.Name(self._turn, "load"), nodes.Name(FIRST, "load")
            return nodes.Test(turn, "sameas", [first], [], None, None).set_lineno(node.lineno)
        return self.generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (the name is Jinja's)
        """A loop within has a `loop` of its own."""
        node.iter = self.visit(node.iter)
        return node
