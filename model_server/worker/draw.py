"""Draws tokens on a CPU without looking for all that top_p leaves: loops that LLVM vectorises.

In: logits. Out: probabilities in their place, and one token a row. A token is drawn from all, and anew where
top_p leaves it out: that is a draw from those that are left. To tell whether top_p leaves one token takes a
fraction of the time that finding all of them takes, and of the draws not much more than 1 - top_p fail.
"""

import numpy as np
from numpy.typing import NDArray

from common.jit import inlined, kernel_of_sums

CHUNK = 128  # tokens; a draw first finds the chunk of the vocabulary, then the token in it
_LOG2_E = np.float32(1.4426950408889634)
_LEAST_EXPONENT = np.float32(-126.0)  # below, float32 has no full precision: taken for 0
# 2 ** x for x in [-0.5, 0.5] by its Taylor series ln(2) ** n / n!, from n = 6 down; the error is 2e-7.
_TERMS = tuple(
    np.float32(term)
    for term in (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
)


def weigh(logits: NDArray[np.float32], temperatures: NDArray[np.float32]) -> NDArray[np.float64]:
    """Turn logits into probabilities, up to a factor of each row.

    Args:
        logits: float32 [rows, vocab_size]; changed in place.
        temperatures: float32 [rows], above 0.

    Returns:
        The sums of the probabilities of each CHUNK: float64 [rows, chunks].
    """
    rows, size = logits.shape
    sums = np.empty((rows, -(-size // CHUNK)))
    powers = np.empty(CHUNK, np.int32)
    _weigh(logits, logits.max(axis=-1), _LOG2_E / temperatures, sums, powers, powers.view(np.float32))
    return sums


@kernel_of_sums
def draw(
    probabilities: NDArray[np.float32],
    sums: NDArray[np.float64],
    at: NDArray[np.int64],
    draws: NDArray[np.float64],
    top_ps: NDArray[np.float64],
    tokens: NDArray[np.int64],
) -> None:
    """Draw from all tokens of some rows, where the cumulated probability exceeds the draw's part of all.

    Args:
        probabilities: float32 [rows, vocab_size], up to a factor of each row.
        sums: As `weigh` returns them.
        at: int64 [some], which rows.
        draws: float64 [some], from 0 to below 1.
        top_ps: float64 [rows].
        tokens: int64 [rows]; set to the token drawn, -1 where top_p leaves it out.
    """
    for index in range(len(at)):
        row = at[index]
        total = sums[row].sum()
        token = _found(probabilities[row], sums[row], draws[index] * total)
        share = top_ps[row] * total
        # Without top_p the sum's rounding must not leave a token out.
        is_left = top_ps[row] >= 1.0 or _before(probabilities[row], token) < share
        tokens[row] = token if is_left else -1


@kernel_of_sums
def _weigh(
    logits: NDArray[np.float32],
    largest: NDArray[np.float32],
    scales: NDArray[np.float32],
    sums: NDArray[np.float64],
    powers: NDArray[np.int32],
    factors: NDArray[np.float32],
) -> None:
    # 2 ** x is a power of two, written into a float's bits, times a polynomial. `factors` are `powers` as
    # floats: LLVM does not vectorise a loop that reinterprets numbers by itself.
    for row in range(logits.shape[0]):
        for chunk in range(sums.shape[1]):
            values = logits[row, chunk * CHUNK : (chunk + 1) * CHUNK]
            for j in range(len(values)):
                exponent = (values[j] - largest[row]) * scales[row]
                is_some = exponent >= _LEAST_EXPONENT
                whole = np.floor((exponent if is_some else _LEAST_EXPONENT) + np.float32(0.5))
                values[j] = (exponent if is_some else _LEAST_EXPONENT) - whole
                powers[j] = (np.int32(whole) + np.int32(127)) << np.int32(23) if is_some else np.int32(0)
            total = np.float32(0.0)
            for j in range(len(values)):
                values[j] = _polynomial(values[j]) * factors[j]
                total += values[j]
            sums[row, chunk] = total


@inlined
def _polynomial(x: np.float32) -> np.float32:
    result = _TERMS[0]
    for term in _TERMS[1:]:
        result = result * x + term
    return result


@inlined
def _found(row: NDArray[np.float32], sums: NDArray[np.float64], rest: float) -> int:
    chunk = 0
    while chunk < len(sums) - 1 and rest >= sums[chunk]:
        rest -= sums[chunk]
        chunk += 1
    found = chunk * CHUNK
    for token in range(found, min(len(row), found + CHUNK)):
        # Where rounding lets the draw fall off the chunk's end: its last token that can be chosen.
        if row[token] > 0:
            found = token
            if rest < row[token]:
                break
            rest -= row[token]
    return found


@inlined
def _before(row: NDArray[np.float32], token: int) -> float:
    """Return the sum of what comes before a token, more probable or as probable with a lower id."""
    own, before = row[token], 0.0
    for other in range(token):
        before += row[other] if row[other] >= own else np.float32(0.0)
    for other in range(token + 1, len(row)):
        before += row[other] if row[other] > own else np.float32(0.0)
    return before
