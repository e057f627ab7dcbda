"""Kernels that are called past numba's dispatch."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from compiled.direct import CHECK_VARIABLE, DirectKernel
from compiled.jit import kernel


def _summed() -> DirectKernel[[NDArray[np.int64], int], int]:
    @DirectKernel
    @kernel
    def summed(numbers: NDArray[np.int64], more: int) -> int:
        total = more
        for number in numbers:
            total += number
        return total

    return summed


_NUMBERS = np.arange(5)
_compiled = pytest.mark.skipif(not hasattr(_summed().kernel, "overloads"), reason="numba is switched off")


@_compiled
def test_later_calls_meet_no_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on, what is called is the compiled code, with the same results and errors."""
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    summed = _summed()
    assert summed.call(_NUMBERS, 1) == 11
    assert type(summed.call).__name__ == "builtin_function_or_method"
    assert summed.call(_NUMBERS[1:], 2) == 12
    wrong: Callable[..., object] = summed.call
    with pytest.raises(TypeError):
        wrong([1], 2)
    with pytest.raises(TypeError):
        wrong(_NUMBERS)


@_compiled
@pytest.mark.parametrize(
    ("other", "told"),
    [
        (_NUMBERS.astype(np.uint64), "uint64"),
        (np.arange(10)[::2], "'A'"),
        (_NUMBERS.astype(np.int32), "int32"),
    ],
    ids=["sign", "layout", "size"],
)
def test_the_check_refuses_other_types(
    monkeypatch: pytest.MonkeyPatch, other: NDArray[np.int64], told: str
) -> None:
    """Where calls are checked, arguments of other types than the first call's are refused, and named."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    summed = _summed()
    assert summed.call(_NUMBERS, 1) == summed.call(_NUMBERS[:5], 1) == 11
    with pytest.raises(
        TypeError, match=rf"summed was called with arguments of several types: .*, then .*{told}"
    ):
        summed.call(other, 1)


def test_the_check_allows_memory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel only reads may be read-only or not, from call to call."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    summed = _summed()
    assert summed.call(_NUMBERS, 0) == summed.call(np.frombuffer(_NUMBERS.tobytes(), np.int64), 0) == 10


@_compiled
def test_the_check_refuses_to_write_what_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls are checked, a kernel that writes is not given read-only memory."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")

    @DirectKernel
    @kernel
    def cleared(numbers: NDArray[np.int64]) -> None:
        numbers[:] = 0

    cleared.call(_NUMBERS.copy())
    with pytest.raises(numba.TypingError, match="readonly"):
        cleared.call(np.frombuffer(_NUMBERS.tobytes(), np.int64))


@_compiled
def test_what_is_checked_is_the_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checked call runs the very code that an unchecked one does, and no other type is compiled for it."""
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    summed = _summed()
    summed.call(_NUMBERS, 1)
    with pytest.raises(TypeError):
        summed.call(_NUMBERS.astype(np.int32), 1)
    assert len(summed.kernel.signatures) == 1


def test_what_is_not_compiled_is_called_as_it_is() -> None:
    """With numba switched off a kernel is a plain function, and so is its call."""

    def doubled(number: int) -> int:
        return 2 * number

    assert DirectKernel(doubled).call is doubled
