"""Fixtures of the tests with real engines: vLLM for CPU, installed once into the user's cache directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines.install import EngineUnavailableError, installed_engine

_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def executables() -> Path:
    """Return the folder of vLLM's executables, or skip where vLLM cannot run."""
    try:
        return installed_engine()
    except EngineUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that adds a line to the run's summary."""
    return request.config.stash.setdefault(_FIGURES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was predicted and delivered, with the cause of each difference."""
    if lines := config.stash.get(_FIGURES, []):
        terminalreporter.section("predicted and delivered")
        terminalreporter.write_line("\n".join(lines))
