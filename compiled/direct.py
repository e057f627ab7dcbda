"""Kernels that every request or event calls, past numba's dispatch: arguments in, their results out.

numba looks at every argument of every call to find the code for its type, which costs a small kernel more
than its work. Here the first call's types are taken to be all others', too. Nothing looks whether they are,
except with KVROUTE_CHECK_KERNELS=1, which the tests set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import numba
from numba import types

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

CHECK_VARIABLE = "KVROUTE_CHECK_KERNELS"


class DirectKernel(Generic[_Parameters, _Result]):
    """Decorates what `jit.kernel` and its kin make, for callers that always give arguments of the same types.

    To the compiled code a number's type and an array's sign and strides are what they were at first, whatever
    comes. So give it whole arrays, not columns of others: one of a single item looks contiguous, and is taken
    to be so for good.

    Attributes:
        call: Calls it; to be looked up for each call. The first one finds or compiles the code.
        kernel: As given, for other kernels to call.
    """

    __slots__ = ("call", "kernel")

    def __init__(self, kernel: Callable[_Parameters, _Result]) -> None:
        self.kernel: Any = kernel
        self.call: Callable[_Parameters, _Result] = self._first
        if not hasattr(kernel, "overloads"):  # it runs as plain Python
            self.call = kernel

    def _first(self, *args: _Parameters.args, **_: _Parameters.kwargs) -> _Result:
        result: _Result = self.kernel(*args)
        given = _types(args)
        compiled = self.kernel.get_overload(given)
        is_checked = os.environ.get(CHECK_VARIABLE) == "1"
        self.call = partial(self._checked, compiled, given) if is_checked else compiled
        return result

    def _checked(self, compiled: Callable[..., _Result], first: tuple[Any, ...], *args: object) -> _Result:
        if (given := _types(args)) != first:
            if _as_read(given) != _as_read(first):
                raise TypeError(
                    f"{self.kernel.__name__} was called with arguments of several types: {first}, then "
                    f"{given}; give it one, or do without DirectKernel"
                )
            # Fails if it writes to what may not be written to.
            self.kernel.compile(given)
        return compiled(*args)


def _types(args: tuple[object, ...]) -> tuple[Any, ...]:
    return tuple(map(numba.typeof, args))


def _as_read(kind: Any) -> Any:
    """Types without whether arrays may be written to."""
    if isinstance(kind, types.Array):
        return kind.copy(readonly=False)
    several: Any = kind if isinstance(kind, tuple | types.BaseTuple) else None
    return kind if several is None else tuple(map(_as_read, several))
