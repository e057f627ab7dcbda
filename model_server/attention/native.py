"""What kernels need beyond numba's own: memory at addresses and on the stack, a count that threads share.

In and out: operations that kernels are written in. Nothing checks an address.
"""

# ruff: noqa: ARG001 - numba wants all arguments

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_STACK_ALIGNMENT_BYTES = 64


@intrinsic
def take_ticket(_: Any, counter: Any) -> Any:
    """Return the number that an int64 pointer points to, and count it up; no two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        address = builder.bitcast(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", address, ir.Constant(number, 1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """Return an address, given as int64, as numba's `carray` takes it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def stack(_: Any, size_bytes: Any) -> Any:
    """Return memory on the stack, good until the function returns that asks for it; not for a loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = builder.alloca(ir.IntType(8), arguments[0])
        memory.align = _STACK_ALIGNMENT_BYTES
        return memory

    return types.voidptr(types.int64), generate
