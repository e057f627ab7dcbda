"""Count of the items that an object refers to."""

from __future__ import annotations

import gc
from collections import deque
from types import FunctionType, ModuleType

_CONTAINERS = (dict, list, set, tuple, deque)


def items_within(root: object, *, but: object) -> int:
    """Return the number of items in all containers that the root refers to, except those of one object."""
    seen, todo, items = {id(but)}, [root], 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(each))
        items += len(each) if isinstance(each, _CONTAINERS) else 0
        todo += gc.get_referents(each)
    return items
