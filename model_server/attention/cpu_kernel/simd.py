"""SIMD intrinsics for numba kernels: vectors of 16 float32 lanes, and their loads and stores.

LLVM compiles them for the CPU's register width. Rows are float32, bfloat16 (as uint16) or float16 (as int16),
[rows, width], with a width that is a multiple of a part. A part is 32 numbers in two vectors, in the order
that is fastest to read; it is the same for all rows of a type. Other arrays are flat float32. Indices are not
checked.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16
_STACK_ALIGNMENT_BYTES = 64
VECTOR, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)

PART = 2 * LANES
_CACHE_LINE_BYTES = 64
_READ_TO_NEAREST = (0, 3, 1)  # arguments of llvm.prefetch: read, nearest cache, data

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def same_constant(number: float, kind: ir.VectorType = VECTOR) -> ir.Constant:
    """Return a constant vector with a number in all lanes."""
    return ir.Constant(kind, [number] * LANES)


_UPPER = same_constant(0xFFFF0000, WORDS)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes_type = _Lanes()
_both = types.UniTuple(lanes_type, 2)


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: object, lanes: object) -> None:
        super().__init__(manager, lanes, VECTOR)  # type: ignore[no-untyped-call]  # numba gives it no types


class _Site(NamedTuple):
    """Code generation site of an operation."""

    context: Any  # numba's target context
    builder: Any  # LLVM IR builder
    kinds: Any  # numba types of the operands


def _operation(result: Any) -> Callable[[Any], Any]:
    """Return a decorator that makes a numba intrinsic, of this result type, of a generator of LLVM IR."""

    def made(generate: Any) -> Any:
        @wraps(generate)  # numba reads the names of the operands from the signature
        def typed(_: Any, *operands: Any) -> Any:
            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return generate(_Site(context, builder, signature.args), *arguments)

            kinds = [types.int64 if isinstance(kind, types.Integer) else kind for kind in operands]
            return result(*kinds), build

        return intrinsic(typed)

    return made


@_operation(lanes_type)
def splat(site: _Site, number: Any) -> Any:
    """Return a vector with a number in all lanes."""
    number = site.context.cast(site.builder, number, site.kinds[0], types.float32)
    one = site.builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(_I32, 0))
    return site.builder.shuffle_vector(one, one, ir.Constant(WORDS, [0] * LANES))


@_operation(lanes_type)
def times(site: _Site, a: Any, b: Any) -> Any:
    """Return a * b."""
    return site.builder.fmul(a, b)


@_operation(lanes_type)
def plus(site: _Site, a: Any, b: Any) -> Any:
    """Return a + b."""
    return site.builder.fadd(a, b)


@_operation(lanes_type)
def times_plus(site: _Site, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once if the CPU has fused multiply-add."""
    return _times_plus(site.builder, a, b, c)


@_operation(lanes_type)
def larger(site: _Site, a: Any, b: Any) -> Any:
    """Return the maximum, lane by lane."""
    return _larger(site.builder, a, b)


@_operation(types.float32)
def sum_of(site: _Site, a: Any) -> Any:
    """Return the sum of all lanes."""
    return _folded(site.builder, a, site.builder.fadd)


@_operation(types.float32)
def largest_of(site: _Site, a: Any) -> Any:
    """Return the maximum of all lanes."""
    return _folded(site.builder, a, lambda one, other: _larger(site.builder, one, other))


@_operation(lanes_type)
def power_of_two(site: _Site, exponent: Any) -> Any:
    """Return 2**exponent for exponents of at most 0; results are at least 2**-126."""
    builder = site.builder
    exponents = _larger(builder, same_constant(-126.0), exponent)
    # Adding 1.5 * 2**23 rounds to an integer, which is in the lowest bits of the sum.
    shifted = builder.fadd(exponents, same_constant(_ROUNDING))
    rest = builder.fsub(exponents, builder.fsub(shifted, same_constant(_ROUNDING)))
    # Taylor series of 2**rest; the next term is below 1e-8 for |rest| <= 0.5.
    power = same_constant(_TAYLOR[-1])
    for coefficient in _TAYLOR[-2::-1]:
        power = _times_plus(builder, power, rest, same_constant(coefficient))
    whole = builder.add(builder.bitcast(shifted, WORDS), same_constant(127, WORDS))
    return builder.fmul(power, builder.bitcast(builder.shl(whole, same_constant(23, WORDS)), VECTOR))


_ROUNDING = 1.5 * 2.0**23
_TAYLOR = [float(np.log(2.0) ** power / np.prod(np.arange(1.0, power + 1.0))) for power in range(8)]


@_operation(lanes_type)
def load(site: _Site, numbers: Any, index: Any) -> Any:
    """Load a vector from an array at an index."""
    return site.builder.load(_address(site, numbers, index, VECTOR), align=4)


@_operation(types.float32)
def at(site: _Site, numbers: Any, index: Any) -> Any:
    """Load one number from an array at an index >= 0."""
    return site.builder.load(_address(site, numbers, index, _FLOAT))


@_operation(types.void)
def store(site: _Site, numbers: Any, index: Any, value: Any) -> None:
    """Store a vector to an array at an index."""
    site.builder.store(value, _address(site, numbers, index, VECTOR), align=4)


@_operation(types.void)
def store_sums(site: _Site, numbers: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Store the lane sums of four vectors to an array at an index."""
    builder = site.builder
    quarters = [_quarter(builder, one, builder.fadd) for one in (a, b, c, d)]
    # Add pairs of lanes of two vectors: gives a, a, b, b and c, c, d, d; then a, b, c, d.
    for evens, odds in (((0, 2, 4, 6), (1, 3, 5, 7)),) * 2:
        quarters = [
            builder.fadd(_shuffled(builder, one, other, evens), _shuffled(builder, one, other, odds))
            for one, other in zip(quarters[::2], quarters[1::2], strict=True)
        ]
    builder.store(quarters[0], _address(site, numbers, index, ir.VectorType(_FLOAT, 4)), align=4)


@_operation(types.int64)
def take_ticket(site: _Site, counter: Any) -> Any:
    """Atomically increment the int64 at a pointer, and return its old value."""
    address = site.builder.bitcast(counter, _I64.as_pointer())
    return site.builder.atomic_rmw("add", address, ir.Constant(_I64, 1), "monotonic")


@_operation(types.voidptr)
def pointer(site: _Site, address: Any) -> Any:
    """Convert an int64 address to a pointer for numba's `carray`."""
    return site.builder.inttoptr(address, cgutils.voidptr_t)


@_operation(types.voidptr)
def stack(site: _Site, size_bytes: Any) -> Any:
    """Allocate stack memory, valid until the calling function returns. Do not call it in a loop."""
    memory = site.builder.alloca(ir.IntType(8), size_bytes)
    memory.align = _STACK_ALIGNMENT_BYTES
    return memory


@_operation(_both)
def read(site: _Site, rows: Any, row: Any, first: Any) -> Any:
    """Load a part of a row, starting at element `first`."""
    builder, at = site.builder, _element(site, rows, row, first)
    if site.kinds[0].dtype == types.uint16:  # a word has two bfloat16, each the upper half of a float32
        words = builder.load(builder.bitcast(at, WORDS.as_pointer()), align=2)
        halves = builder.shl(words, same_constant(16, WORDS)), builder.and_(words, _UPPER)
        vectors = [builder.bitcast(half, VECTOR) for half in halves]
    else:
        vectors = [builder.load(place, align=2) for place in _vector_addresses(site, at)]
        if site.kinds[0].dtype == types.int16:
            vectors = [builder.fpext(vector, VECTOR) for vector in vectors]
    return site.context.make_tuple(builder, _both, vectors)


@_operation(types.void)
def write(site: _Site, rows: Any, row: Any, first: Any, both: Any) -> None:
    """Store a part of a row, starting at element `first`."""
    builder, at = site.builder, _element(site, rows, row, first)
    vectors = [builder.extract_value(both, vector) for vector in range(2)]
    if site.kinds[0].dtype == types.uint16:
        low, high = (_rounded(builder, vector) for vector in vectors)
        words = builder.or_(builder.lshr(low, same_constant(16, WORDS)), builder.and_(high, _UPPER))
        builder.store(words, builder.bitcast(at, WORDS.as_pointer()), align=2)
    else:
        for vector, place in zip(vectors, _vector_addresses(site, at), strict=True):
            is_narrow = site.kinds[0].dtype == types.int16
            builder.store(builder.fptrunc(vector, _HALVES) if is_narrow else vector, place, align=2)


@_operation(types.void)
def prefetch(site: _Site, rows: Any, row: Any, first: Any) -> None:
    """Prefetch a part of a row into the nearest cache."""
    builder = site.builder
    at = builder.bitcast(_element(site, rows, row, first), cgutils.voidptr_t)
    kind = ir.FunctionType(ir.VoidType(), [at.type, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], kind)
    for offset in range(0, PART * site.kinds[0].dtype.bitwidth // 8, _CACHE_LINE_BYTES):
        line = builder.gep(at, [ir.Constant(_I64, offset)])
        builder.call(function, [line, *(ir.Constant(_I32, flag) for flag in _READ_TO_NEAREST)])


def _times_plus(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = f"llvm.fmuladd.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), (a, b, c))


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _shuffled(builder: Any, one: Any, other: Any, places: Any) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_I32, len(places)), list(places)))


def _quarter(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine halves of a vector until four lanes are left."""
    while (half := vector.type.count // 2) >= 4:
        lower = _shuffled(builder, vector, vector, range(half))
        vector = combine(lower, _shuffled(builder, vector, vector, range(half, 2 * half)))
    return vector


def _folded(builder: Any, vector: Any, combine: Any) -> Any:
    four = _quarter(builder, vector, combine)
    for places in ((2, 3, 0, 1), (1, 0, 3, 2)):
        four = combine(four, _shuffled(builder, four, four, places))
    return builder.extract_element(four, ir.Constant(_I32, 0))


def _address(site: _Site, array: Any, index: Any, pointee: ir.Type) -> Any:
    """Return the address of an element of a flat array."""
    data = site.context.make_array(site.kinds[0])(site.context, site.builder, array).data
    return site.builder.bitcast(site.builder.gep(data, [index]), pointee.as_pointer())


def _vector_addresses(site: _Site, at: Any) -> list[Any]:
    """Return the addresses of the two vectors of a float32 or float16 part."""
    kind = _HALVES if site.kinds[0].dtype == types.int16 else VECTOR
    at = site.builder.bitcast(at, kind.as_pointer())
    return [site.builder.gep(at, [ir.Constant(_I64, vector)]) for vector in range(2)]


def _element(site: _Site, array: Any, row: Any, first: Any) -> Any:
    """Return the address of an element of a row."""
    builder = site.builder
    rows = site.context.make_array(site.kinds[0])(site.context, builder, array)
    width = cgutils.unpack_tuple(builder, rows.shape)[1]
    return builder.gep(rows.data, [builder.add(builder.mul(row, width), first)])


def _rounded(builder: Any, numbers: Any) -> Any:
    """Round to nearest even, so that the upper halves of the words are bfloat16."""
    bits = builder.bitcast(numbers, WORDS)
    odd = builder.and_(builder.lshr(bits, same_constant(16, WORDS)), same_constant(1, WORDS))
    return builder.add(bits, builder.add(odd, same_constant(0x7FFF, WORDS)))
