"""Real vLLM servers beside a router: predicted cached tokens equal those that the engine reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engines.beside import EAGLE, Beside, Case, running_beside
from tests.support.engines.checkpoints import (
    eagle3_head,
    eagle_head,
    eight_layers,
    glm4_moe,
    gpt_oss,
    hybrid,
    llama,
)
from tests.support.engines.door import differing
from tests.support.engines.engine import MODEL
from tests.support.engines.traffic import play

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

# vLLM publishes a step's events up to 0.1 s after the answer, later on a busy machine.
_EVENTS_S = 0.15
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 2}
_MTP = {"method": "mtp", "num_speculative_tokens": 1}
_DUMMY = ("--dtype", "bfloat16", "--load-format", "dummy")
_OSS = Case(gpt_oss, blocks=400, arguments=_DUMMY, router={"tokenizers": ((MODEL, "pods"),)})
CASES = [
    pytest.param(Case(llama), id="plain"),
    pytest.param(Case(llama, block_tokens=64, blocks=128), id="plain-64"),
    pytest.param(Case(llama, _NGRAM), id="ngram"),
    pytest.param(Case(hybrid, blocks=400), id="window"),
    pytest.param(Case(llama, EAGLE, eagle_head), id="eagle"),
    pytest.param(Case(hybrid, EAGLE, eagle_head, blocks=500), id="eagle-window"),
    pytest.param(Case(eight_layers, _EAGLE3, eagle3_head, block_tokens=64, blocks=128), id="eagle3-64"),
    pytest.param(Case(glm4_moe, _MTP, arguments=_DUMMY), id="mtp"),
    pytest.param(_OSS, id="gpt-oss"),
    pytest.param(Case(llama, ranks=2), id="two-ranks"),
]


@pytest.fixture(scope="module", params=CASES)
def beside(
    request: pytest.FixtureRequest, executables: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    """Run an engine, and beside it a router that is ready with its view."""
    with running_beside(request.param, executables, tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.mark.parametrize(("at_once", "rounds", "least"), [(1, 9, 0.995), (4, 16, 0.99)], ids=["one", "four"])
def test_predictions_equal_what_the_engine_delivers(
    beside: Beside,
    figure: Callable[[str], None],
    request: pytest.FixtureRequest,
    at_once: int,
    rounds: int,
    least: float,
) -> None:
    """The prediction equals `usage` in 99.5 % of the requests one at a time, and in 99 % four at once."""
    # Four workers that each wait for everything would take turns.
    await_events = beside.await_events if at_once == 1 else lambda: time.sleep(_EVENTS_S)
    served = play(
        beside.door, beside.case.block_tokens, rounds=rounds, at_once=at_once, await_events=await_events
    )
    [published] = beside.published
    published.receive_all()
    wrong = differing(served, speculative=bool(beside.case.speculative))
    unequal = [one for one in served if not one.is_equal]
    sums = f"{sum(one.predicted for one in served)} / {sum(one.delivered for one in served)} tokens"
    hits = sum(one.delivered > 0 for one in served)
    figure(f"{request.node.callspec.id}: {len(unequal)} of {len(served)} differ, {hits} hits, {sums}")
    for one in unequal:
        cause = published.cause(one) if one in wrong else "not learned yet"
        figure(f"  {one.predicted} predicted, {one.delivered} of {len(one.prompt)} delivered: {cause}")
    assert hits, "no request hit the cache"
    assert len(wrong) <= (1 - least) * len(served)
