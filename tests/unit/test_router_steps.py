"""Steps: taken alone they are the straight line that they are written as."""

from __future__ import annotations

import pytest

from router.steps import GOES_ON, MAY_WAIT, Steps, alone


def _steps(taken: list[str], *, fails: bool = False) -> Steps[int]:
    taken.append("first")
    yield GOES_ON
    taken.append("second")
    yield MAY_WAIT
    if fails:
        raise ValueError("tripped")
    return 7


def test_alone_all_steps_are_taken() -> None:
    """Whoever asks for the result alone gets it, whether or not a step may wait."""
    taken: list[str] = []
    assert alone(_steps(taken)) == 7
    assert taken == ["first", "second"]


def test_an_error_of_a_step_is_the_callers() -> None:
    """What a step raises comes to whoever takes it."""
    with pytest.raises(ValueError, match="tripped"):
        alone(_steps([], fails=True))
