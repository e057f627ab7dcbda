"""Captures of real engines in ../shared/data, played to a router: predictions equal what was delivered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.captures import play
from tests.support.engines.door import differing
from tests.support.paths import ROOT

FRAMES = sorted((ROOT.parent / "shared" / "data").glob("*_frames.jsonl.gz"))
# A reset is published with the next request's events only; of concurrent twins one hits the other's blocks.
UNKNOWABLE = ("r16 after reset", "r25 conc", "r27 conc", "g11 after reset")
EQUAL_SHARE = 0.995


def has(path: Path, *methods: str) -> bool:
    """Return whether the capture is of one of these methods of speculative decoding."""
    return any(method in path.name for method in methods)


@pytest.mark.skipif(not FRAMES, reason="the captures (../shared/data) are not part of the repository")
@pytest.mark.parametrize("frames", FRAMES, ids=lambda path: path.name.removesuffix("_frames.jsonl.gz"))
def test_predictions_equal_what_an_engine_served(frames: Path, tmp_path: Path) -> None:
    """A router with default settings predicts what the engine delivered, in 99.5 % of the requests."""
    speculative = has(frames, "eagle", "mtp", "ngram", "draft", "nodrop")
    played = play(frames, tmp_path, speculative=speculative)
    served = [one for label, one in played if not label.startswith(UNKNOWABLE)]
    wrong = differing(served, speculative=speculative)
    told = [(len(one.prompt), one.predicted, one.delivered, one.view, one.degraded) for one in wrong]
    assert len(wrong) <= (1 - EQUAL_SHARE) * len(served), (len(served), told)
