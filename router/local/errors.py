"""What can keep the local stack from running; each message is the one line the user sees.

LocalStackError
├── PortInUseError      names the port and how to choose another
├── ChildDiedError      names the child, how it ended and what it said last
└── DemoError           the stack runs, but the demonstration did not show what it should
"""

from __future__ import annotations


class LocalStackError(Exception):
    """Root: the command prints the message as one line and exits with 1."""


class PortInUseError(LocalStackError):
    """A port of the stack is taken."""


class ChildDiedError(LocalStackError):
    """A process the stack cannot do without ended."""


class DemoError(LocalStackError):
    """The demonstration failed."""
