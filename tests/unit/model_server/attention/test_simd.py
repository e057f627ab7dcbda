"""cpu_kernel.simd: operations equal those of numpy and torch."""

import numba
import numpy as np
import pytest
import torch

from model_server.attention.cpu_kernel.simd import (
    LANES,
    PART,
    largest_of,
    load,
    power_of_two,
    read,
    store,
    store_sums,
    sum_of,
    write,
)

pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="kernels are not compiled")


@numba.njit
def _powers(numbers: np.ndarray, results: np.ndarray) -> None:
    for first in range(0, len(numbers), LANES):
        store(results, first, power_of_two(load(numbers, first)))


@numba.njit
def _folds(numbers: np.ndarray, results: np.ndarray) -> None:
    lots = load(numbers, 0), load(numbers, LANES), load(numbers, 2 * LANES), load(numbers, 3 * LANES)
    store_sums(results, 0, lots[0], lots[1], lots[2], lots[3])
    results[4] = sum_of(lots[0])
    results[5] = largest_of(lots[0])


@numba.njit
def _copy(rows: np.ndarray, copies: np.ndarray) -> None:
    for row in range(len(rows)):
        for first in range(0, rows.shape[1], PART):
            write(copies, row, first, read(rows, row, first))


@numba.njit
def _narrow(numbers: np.ndarray, results: np.ndarray) -> None:
    for first in range(0, numbers.shape[1], PART):
        write(results, 0, first, (load(numbers[0], first), load(numbers[0], first + LANES)))


def test_powers_of_two_are_exact_to_a_few_units_in_the_last_place() -> None:
    """Powers of two are accurate from 0 to the smallest normal number, and constant below it."""
    exponents = np.linspace(-126, 0, 16 * 5000, dtype=np.float32)
    results = np.empty_like(exponents)
    _powers(exponents, results)
    np.testing.assert_allclose(results, np.exp2(exponents.astype(np.float64)), rtol=3e-7)
    assert results[-1] == 1.0
    special = np.array([-np.inf, -1e30, -127, np.nan] * 4, np.float32)
    _powers(special, results)
    np.testing.assert_array_equal(results[:4], np.array([2.0**-126] * 3 + [np.nan], np.float32))


def test_lanes_are_summed_lot_by_lot() -> None:
    """Four lane sums are stored in order; the sum and maximum of one vector are its own."""
    numbers = np.random.default_rng(0).integers(-99, 99, 4 * LANES).astype(np.float32)
    results = np.empty(6, np.float32)
    _folds(numbers, results)
    np.testing.assert_array_equal(results[:4], numbers.reshape(4, LANES).sum(axis=1))
    assert results[4:].tolist() == [numbers[:LANES].sum(), numbers[:LANES].max()]


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float32])
@pytest.mark.parametrize("width", [32, 64, 96])
def test_a_row_is_read_and_written_to_its_end_and_no_further(dtype: type, width: int) -> None:
    """Rows copied part by part are equal; memory beside them is unchanged."""
    rows = np.random.default_rng(0).integers(0, 1 << 14, (4, width)).astype(dtype)
    copies = np.full((5, width), 7, dtype)
    _copy(rows, copies[:4])
    np.testing.assert_array_equal(copies[:4], rows)
    assert (copies[4] == 7).all()


def test_numbers_are_narrowed_as_torch_does() -> None:
    """Conversion to bfloat16 rounds ties to even and large numbers to infinity."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 32 * 500, np.uint64).astype(np.uint32)
    bits[:3] = 0x3F808000, 0x3F818000, 0x7F7FFFFF
    numbers = np.nan_to_num(bits.view(np.float32))
    results = np.empty((1, len(numbers)), np.uint16)
    _narrow(numbers[None], results)
    # A row of bfloat16 stores two vectors side by side.
    order = np.arange(len(numbers)).reshape(-1, 2, LANES).transpose(0, 2, 1).ravel()
    want = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(results[0], want[order])
