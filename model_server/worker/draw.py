"""Rejection sampling with top_p on a CPU, in loops that LLVM vectorises.

A token is drawn from the whole distribution, and rejected if top_p removes it. Checking one token takes a
fraction of the time of finding all kept tokens, and not much more than 1 - top_p of the draws are rejected.
"""

import numpy as np
from numpy.typing import NDArray

from common.jit import fastmath_kernel, inlined

CHUNK = 128  # tokens per partial sum: a draw first finds the chunk, then the token in it
_LOG2_E = np.float32(1.4426950408889634)
_EXPONENT_MIN = np.float32(-126.0)  # smaller powers of two are subnormal in float32 and count as 0
# Taylor coefficients ln(2) ** n / n! of 2 ** x, n from 6 to 0; the error is 2e-7 for x in [-0.5, 0.5].
_TERMS = tuple(
    np.float32(term)
    for term in (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
)


def exponentiate(logits: NDArray[np.float32], temperatures: NDArray[np.float32]) -> NDArray[np.float64]:
    """Replace logits by unnormalised probabilities exp((logit - maximum) / temperature).

    Args:
        logits: float32 [rows, vocab_size]; modified in place.
        temperatures: float32 [rows], above 0.

    Returns:
        Sums per CHUNK tokens: float64 [rows, chunks].
    """
    num_rows, size = logits.shape
    sums = np.empty((num_rows, -(-size // CHUNK)))
    powers = np.empty(CHUNK, np.int32)
    _exponentiate(logits, logits.max(axis=-1), _LOG2_E / temperatures, sums, powers, powers.view(np.float32))
    return sums


@fastmath_kernel
def draw(
    probabilities: NDArray[np.float32],
    sums: NDArray[np.float64],
    rows: NDArray[np.int64],
    draws: NDArray[np.float64],
    top_ps: NDArray[np.float64],
    tokens: NDArray[np.int64],
) -> None:
    """Draw a token for some rows: the first whose cumulative probability exceeds draw x total.

    Args:
        probabilities: float32 [rows, vocab_size], unnormalised.
        sums: Result of `exponentiate`.
        rows: int64 [drawn rows], indices of rows.
        draws: float64 [drawn rows], at least 0 and below 1.
        top_ps: float64 [rows].
        tokens: Output, int64 [rows]: the token, or -1 if top_p rejects it.
    """
    for index in range(len(rows)):
        row = rows[index]
        total = sums[row].sum()
        token = _find_token(probabilities[row], sums[row], draws[index] * total)
        share = top_ps[row] * total
        # Without top_p, rounding of the sum must not reject a token.
        is_kept = top_ps[row] >= 1.0 or _more_probable_sum(probabilities[row], token) < share
        tokens[row] = token if is_kept else -1


@fastmath_kernel
def _exponentiate(
    logits: NDArray[np.float32],
    largest: NDArray[np.float32],
    scales: NDArray[np.float32],
    sums: NDArray[np.float64],
    powers: NDArray[np.int32],
    factors: NDArray[np.float32],
) -> None:
    # 2 ** x is a power of two, built from its exponent bits, times a polynomial. `factors` is a float view of
    # `powers`: LLVM does not vectorise a loop that reinterprets numbers itself.
    for row in range(logits.shape[0]):
        for chunk in range(sums.shape[1]):
            values = logits[row, chunk * CHUNK : (chunk + 1) * CHUNK]
            for j in range(len(values)):
                exponent = (values[j] - largest[row]) * scales[row]
                in_range = exponent >= _EXPONENT_MIN
                whole = np.floor((exponent if in_range else _EXPONENT_MIN) + np.float32(0.5))
                values[j] = (exponent if in_range else _EXPONENT_MIN) - whole
                powers[j] = (np.int32(whole) + np.int32(127)) << np.int32(23) if in_range else np.int32(0)
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
def _find_token(row: NDArray[np.float32], sums: NDArray[np.float64], rest: float) -> int:
    chunk = 0
    while chunk < len(sums) - 1 and rest >= sums[chunk]:
        rest -= sums[chunk]
        chunk += 1
    found = chunk * CHUNK
    for token in range(found, min(len(row), found + CHUNK)):
        # If rounding puts the draw beyond the chunk's end, use its last token with a probability above 0.
        if row[token] > 0:
            found = token
            if rest < row[token]:
                break
            rest -= row[token]
    return found


@inlined
def _more_probable_sum(row: NDArray[np.float32], token: int) -> float:
    """Return the probability sum of tokens that are more probable, or equal with a lower id."""
    own, before = row[token], 0.0
    for other in range(token):
        before += row[other] if row[other] >= own else np.float32(0.0)
    for other in range(token + 1, len(row)):
        before += row[other] if row[other] > own else np.float32(0.0)
    return before
