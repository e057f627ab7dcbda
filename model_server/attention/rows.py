"""Rows of numbers, seen as lanes part by part.

In and out: operations that kernels are written in. Rows are float32, or bfloat16 seen as uint16, [rows,
width] with an even width; a part is 32 numbers in two lots of lanes. Their order in it is that in which they
are read fastest, the same for all rows of a type. Nothing checks a row.
"""

# ruff: noqa: ARG001 - numba wants all arguments

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from model_server.attention.lanes import LANES, VECTOR, WORDS, lanes_type, same_constant, spread

PART = 2 * LANES

_CACHE_LINE_BYTES = 64
_READ_TO_NEAREST = (0, 3, 1)  # of llvm.prefetch: to read, into the cache nearest to the core, data

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_both = types.UniTuple(lanes_type, 2)


@intrinsic
def read(_: Any, rows: Any, row: Any, first: Any) -> Any:
    """A part of a row, from element `first` on, all of which the row has."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _element(context, builder, signature.args[0], arguments)
        return _as_tuple(context, builder, _loaded(builder, at, signature.args[0].dtype))

    return _both(rows, types.int64, types.int64), generate


@intrinsic
def read_end(_: Any, rows: Any, row: Any, first: Any) -> Any:
    """A part of a row that ends before the part does; zeros follow."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _element(context, builder, signature.args[0], arguments)
        left = _elements_left(context, builder, signature.args[0], arguments)
        return _as_tuple(context, builder, _loaded(builder, at, signature.args[0].dtype, left))

    return _both(rows, types.int64, types.int64), generate


@intrinsic
def write(_: Any, rows: Any, row: Any, first: Any, both: Any) -> Any:
    """Write a part of a row, all of which the row has."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _element(context, builder, signature.args[0], arguments)
        _store_both(builder, at, signature.args[0].dtype, arguments[3])

    return types.void(rows, types.int64, types.int64, both), generate


@intrinsic
def write_end(_: Any, rows: Any, row: Any, first: Any, both: Any) -> Any:
    """Write a part of a row that ends before the part does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _element(context, builder, signature.args[0], arguments)
        left = _elements_left(context, builder, signature.args[0], arguments)
        _store_both(builder, at, signature.args[0].dtype, arguments[3], left)

    return types.void(rows, types.int64, types.int64, both), generate


@intrinsic
def prefetch(_: Any, rows: Any, row: Any, first: Any) -> Any:
    """Have a part of a row fetched that is read soon, whether or not the row has all of it."""

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


def _elements_left(context: Any, builder: Any, kind: Any, arguments: Any) -> Any:
    rows = context.make_array(kind)(context, builder, arguments[0])
    width = cgutils.unpack_tuple(builder, rows.shape)[1]
    return builder.trunc(builder.sub(width, arguments[2]), _I32)


def _loaded(builder: Any, at: Any, dtype: Any, left: Any = None) -> tuple[Any, Any]:
    if dtype == types.float32:
        at = builder.bitcast(at, VECTOR.as_pointer())
        beyond = builder.gep(at, [ir.Constant(_I64, 1)])
        return _load(builder, at, 4, left, 0, 1), _load(builder, beyond, 4, left, LANES, 1)
    # A word is two neighbours; each is the upper half of its float32.
    words = _load(builder, builder.bitcast(at, WORDS.as_pointer()), 2, left, 0, 2)
    low = builder.shl(words, same_constant(16, WORDS))
    high = builder.and_(words, same_constant(0xFFFF0000, WORDS))
    return builder.bitcast(low, VECTOR), builder.bitcast(high, VECTOR)


def _store_both(builder: Any, at: Any, dtype: Any, both: Any, left: Any = None) -> None:
    first, second = (builder.extract_value(both, index) for index in range(2))
    if dtype == types.float32:
        at = builder.bitcast(at, VECTOR.as_pointer())
        _store(builder, first, at, 4, left, 0, 1)
        _store(builder, second, builder.gep(at, [ir.Constant(_I64, 1)]), 4, left, LANES, 1)
        return
    low = builder.lshr(_rounded(builder, first), same_constant(16, WORDS))
    high = builder.and_(_rounded(builder, second), same_constant(0xFFFF0000, WORDS))
    _store(builder, builder.or_(low, high), builder.bitcast(at, WORDS.as_pointer()), 2, left, 0, 2)


def _load(builder: Any, at: Any, align: int, left: Any, first: int, each: int) -> Any:
    if left is None:
        return builder.load(at, align=align)
    vector = at.type.pointee
    mask = _mask(builder, left, first, each)
    kind = ir.FunctionType(vector, [at.type, _I32, mask.type, vector])
    suffix = f"v{LANES}{'i32' if vector == WORDS else 'f32'}.p0"
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{suffix}")
    return builder.call(function, [at, ir.Constant(_I32, align), mask, ir.Constant(vector, None)])


def _store(builder: Any, value: Any, at: Any, align: int, left: Any, first: int, each: int) -> None:
    if left is None:
        builder.store(value, at, align=align)
        return
    vector = at.type.pointee
    mask = _mask(builder, left, first, each)
    kind = ir.FunctionType(ir.VoidType(), [vector, at.type, _I32, mask.type])
    suffix = f"v{LANES}{'i32' if vector == WORDS else 'f32'}.p0"
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.{suffix}")
    builder.call(function, [value, at, ir.Constant(_I32, align), mask])


def _mask(builder: Any, left: Any, first: int, each: int) -> Any:
    """Tell which lanes, of `each` elements, begin before the row ends."""
    starts = ir.Constant(WORDS, [first + each * lane for lane in range(LANES)])
    return builder.icmp_signed("<", starts, spread(builder, left))


def _rounded(builder: Any, numbers: Any) -> Any:
    """Round to nearest, ties to even, so that the upper halves of the words are bfloat16."""
    bits = builder.bitcast(numbers, WORDS)
    odd = builder.and_(builder.lshr(bits, same_constant(16, WORDS)), same_constant(1, WORDS))
    return builder.add(bits, builder.add(odd, same_constant(0x7FFF, WORDS)))


def _as_tuple(context: Any, builder: Any, both: tuple[Any, Any]) -> Any:
    return context.make_tuple(builder, _both, both)
