"""Rows of numbers, seen as lanes part by part.

In and out: operations that kernels are written in. Rows are float32, or bfloat16 seen as uint16, [rows,
width]; their width is a whole number of parts. A part is 32 numbers in two lots of lanes, in the order in
which they are read fastest, the same for all rows of a type. Nothing checks a row.
"""

# ruff: noqa: ARG001 - numba wants all arguments

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from model_server.attention.lanes import LANES, VECTOR, WORDS, lanes_type, same_constant

PART = 2 * LANES

_CACHE_LINE_BYTES = 64
_READ_TO_NEAREST = (0, 3, 1)  # of llvm.prefetch: to read, into the cache nearest to the core, data

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_both = types.UniTuple(lanes_type, 2)


@intrinsic
def read(_: Any, rows: Any, row: Any, first: Any) -> Any:
    """A part of a row, from element `first` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _element(context, builder, signature.args[0], arguments)
        return _as_tuple(context, builder, _loaded(builder, at, signature.args[0].dtype))

    return _both(rows, types.int64, types.int64), generate


@intrinsic
def write(_: Any, rows: Any, row: Any, first: Any, both: Any) -> Any:
    """Write a part of a row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _element(context, builder, signature.args[0], arguments)
        _store_both(builder, at, signature.args[0].dtype, arguments[3])

    return types.void(rows, types.int64, types.int64, both), generate


@intrinsic
def prefetch(_: Any, rows: Any, row: Any, first: Any) -> Any:
    """Have a part of a row fetched that is read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.bitcast(_element(context, builder, signature.args[0], arguments), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [at.type, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], kind)
        for offset in range(0, PART * signature.args[0].dtype.bitwidth // 8, _CACHE_LINE_BYTES):
            line = builder.gep(at, [ir.Constant(_I64, offset)])
            builder.call(function, [line, *(ir.Constant(_I32, flag) for flag in _READ_TO_NEAREST)])

    return types.void(rows, types.int64, types.int64), generate


def _element(context: Any, builder: Any, kind: Any, arguments: Any) -> Any:
    """Point to an element of a row."""
    array, row, first = arguments[:3]
    rows = context.make_array(kind)(context, builder, array)
    width = cgutils.unpack_tuple(builder, rows.shape)[1]
    return builder.gep(rows.data, [builder.add(builder.mul(row, width), first)])


def _loaded(builder: Any, at: Any, dtype: Any) -> tuple[Any, Any]:
    if dtype == types.float32:
        at = builder.bitcast(at, VECTOR.as_pointer())
        return builder.load(at, align=4), builder.load(builder.gep(at, [ir.Constant(_I64, 1)]), align=4)
    # A word is two neighbours; each is the upper half of its float32.
    words = builder.load(builder.bitcast(at, WORDS.as_pointer()), align=2)
    low = builder.shl(words, same_constant(16, WORDS))
    high = builder.and_(words, same_constant(0xFFFF0000, WORDS))
    return builder.bitcast(low, VECTOR), builder.bitcast(high, VECTOR)


def _store_both(builder: Any, at: Any, dtype: Any, both: Any) -> None:
    first, second = (builder.extract_value(both, index) for index in range(2))
    if dtype == types.float32:
        at = builder.bitcast(at, VECTOR.as_pointer())
        builder.store(first, at, align=4)
        builder.store(second, builder.gep(at, [ir.Constant(_I64, 1)]), align=4)
        return
    low = builder.lshr(_rounded(builder, first), same_constant(16, WORDS))
    high = builder.and_(_rounded(builder, second), same_constant(0xFFFF0000, WORDS))
    builder.store(builder.or_(low, high), builder.bitcast(at, WORDS.as_pointer()), align=2)


def _rounded(builder: Any, numbers: Any) -> Any:
    """Round to nearest, ties to even, so that the upper halves of the words are bfloat16."""
    bits = builder.bitcast(numbers, WORDS)
    odd = builder.and_(builder.lshr(bits, same_constant(16, WORDS)), same_constant(1, WORDS))
    return builder.add(bits, builder.add(odd, same_constant(0x7FFF, WORDS)))


def _as_tuple(context: Any, builder: Any, both: tuple[Any, Any]) -> Any:
    return context.make_tuple(builder, _both, both)
