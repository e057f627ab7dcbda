"""Sixteen float32 numbers that are computed with as one, lanes; rows of numbers, and memory, seen as lanes.

These are the operations that kernels are written in, beside numba's own. They are compiled for the processor
that they run on, to several instructions each where its registers are narrower. Rows are float32, or bfloat16
seen as uint16, [rows, width]; their width is a whole number of parts. A part is 32 numbers in two lots of
lanes, in the order in which they are read fastest, the same for all rows of a type. Other arrays are flat;
nothing checks a row, an index or an address.
"""

# ruff: noqa: ARG001, ARG005 - numba wants all arguments, and calls by position

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
_STACK_ALIGNMENT_BYTES = 64
VECTOR, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)

PART = 2 * LANES
_CACHE_LINE_BYTES = 64
_READ_TO_NEAREST = (0, 3, 1)  # of llvm.prefetch: to read, into the cache nearest to the core, data

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes_type = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: object, lanes: object) -> None:
        super().__init__(manager, lanes, VECTOR)


@intrinsic
def splat(_: Any, number: Any) -> Any:
    """The same number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, context.cast(builder, arguments[0], signature.args[0], types.float32))

    return lanes_type(number), generate


@intrinsic
def times(_: Any, a: Any, b: Any) -> Any:
    """The product."""
    return lanes_type(a, b), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def plus(_: Any, a: Any, b: Any) -> Any:
    """The sum."""
    return lanes_type(a, b), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def times_plus(_: Any, a: Any, b: Any, c: Any) -> Any:
    """The sum a * b + c, rounded once where the processor can."""
    return lanes_type(a, b, c), lambda context, builder, signature, arguments: _times_plus(
        builder, *arguments
    )


@intrinsic
def larger(_: Any, a: Any, b: Any) -> Any:
    """The larger numbers."""
    return lanes_type(a, b), lambda context, builder, signature, arguments: _larger(builder, *arguments)


@intrinsic
def sum_of(_: Any, a: Any) -> Any:
    """The sum of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _folded(builder, arguments[0], builder.fadd)

    return types.float32(a), generate


@intrinsic
def largest_of(_: Any, a: Any) -> Any:
    """The largest number of all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _folded(builder, arguments[0], lambda one, other: _larger(builder, one, other))

    return types.float32(a), generate


@intrinsic
def power_of_two(_: Any, exponent: Any) -> Any:
    """2 to the power of numbers of at most 0, but never less than 2**-126."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponents = _larger(builder, same_constant(-126.0), arguments[0])
        # So large a sum has no room for fractions: its lowest bits are the rounded exponent.
        shifted = builder.fadd(exponents, same_constant(_ROUNDING))
        rest = builder.fsub(exponents, builder.fsub(shifted, same_constant(_ROUNDING)))
        # Taylor's series of 2**rest: its next term is below 1e-8 for a rest of a half at most.
        power = same_constant(_TAYLOR[-1])
        for coefficient in _TAYLOR[-2::-1]:
            power = _times_plus(builder, power, rest, same_constant(coefficient))
        whole = builder.add(builder.bitcast(shifted, WORDS), same_constant(127, WORDS))
        return builder.fmul(power, builder.bitcast(builder.shl(whole, same_constant(23, WORDS)), VECTOR))

    return lanes_type(exponent), generate


_ROUNDING = 1.5 * 2.0**23
_TAYLOR = [float(np.log(2.0) ** power / np.prod(np.arange(1.0, power + 1.0))) for power in range(8)]


@intrinsic
def load(_: Any, numbers: Any, index: Any) -> Any:
    """Sixteen numbers of a flat float32 array from an index on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _address(context, builder, signature.args[0], arguments[0], arguments[1], VECTOR)
        return builder.load(at, align=4)

    return lanes_type(numbers, types.int64), generate


@intrinsic
def at(_: Any, numbers: Any, index: Any) -> Any:
    """One number of a flat array; an index is not negative."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load(builder.gep(array.data, [arguments[1]]))

    return numbers.dtype(numbers, types.int64), generate


@intrinsic
def store(_: Any, numbers: Any, index: Any, value: Any) -> Any:
    """Write sixteen numbers of a flat float32 array from an index on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = _address(context, builder, signature.args[0], arguments[0], arguments[1], VECTOR)
        builder.store(arguments[2], at, align=4)

    return types.void(numbers, types.int64, value), generate


@intrinsic
def store_sums(_: Any, numbers: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Write the sums of four lots of lanes to a flat float32 array from an index on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        four = ir.VectorType(_FLOAT, 4)
        quarters = [_quarter(builder, one, builder.fadd) for one in arguments[2:]]
        # Pairs of lanes of two lots at a time: sums in a, a, b, b and c, c, d, d; then one of each.
        for evens, odds in (((0, 2, 4, 6), (1, 3, 5, 7)),) * 2:
            quarters = [
                builder.fadd(_shuffled(builder, one, other, evens), _shuffled(builder, one, other, odds))
                for one, other in zip(quarters[::2], quarters[1::2], strict=True)
            ]
        at = _address(context, builder, signature.args[0], arguments[0], arguments[1], four)
        builder.store(quarters[0], at, align=4)

    return types.void(numbers, types.int64, a, b, c, d), generate


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


def same_constant(number: float, kind: ir.VectorType = VECTOR) -> ir.Constant:
    """Return a number in all lanes."""
    return ir.Constant(kind, [number] * LANES)


def _times_plus(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), (a, b, c))


def _spread(builder: Any, number: Any) -> Any:
    """Put a float32 into all lanes."""
    vector = ir.VectorType(number.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(WORDS, [0] * LANES))


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _shuffled(builder: Any, one: Any, other: Any, places: Any) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_I32, len(places)), list(places)))


def _quarter(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine the halves of lanes, and of these: four are left."""
    while (half := vector.type.count // 2) >= 4:
        lower = _shuffled(builder, vector, vector, range(half))
        vector = combine(lower, _shuffled(builder, vector, vector, range(half, 2 * half)))
    return vector


def _folded(builder: Any, vector: Any, combine: Any) -> Any:
    four = _quarter(builder, vector, combine)
    for places in ((2, 3, 0, 1), (1, 0, 3, 2)):
        four = combine(four, _shuffled(builder, four, four, places))
    return builder.extract_element(four, ir.Constant(_I32, 0))


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, pointee: ir.Type) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


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
