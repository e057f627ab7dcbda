"""Real vLLM servers beside a router: predicted cached tokens equal those that the engine reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from indexer import IndexerConfig
from router.app.server import RouterServer
from tests.support.engines.checkpoints import (
    eagle3_head,
    eagle_head,
    eight_layers,
    glm4_moe,
    gpt_oss,
    hybrid,
    llama,
)
from tests.support.engines.door import Door, applied_batches, differing
from tests.support.engines.engine import MODEL, running_engine
from tests.support.engines.published import Published
from tests.support.engines.traffic import play
from tests.support.loopback import HERE
from tests.support.router.doors import wait_until
from tests.support.router.server import get, ready_pods, running_router, write_pods

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

# vLLM publishes a step's events up to 0.1 s after the answer, later on a busy machine.
_EVENTS_S = 0.15
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
_EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 2}
_MTP = {"method": "mtp", "num_speculative_tokens": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of engine; each cache group must have blocks for the longest context once."""

    checkpoint: Callable[[Path], Path]
    speculative: dict[str, Any] = field(default_factory=dict)
    head: Callable[[Path], Path] | None = None
    block_tokens: int = 32  # the attention kernel for CPUs takes multiples of 32 only
    blocks: int = 256
    ranks: int = 1
    arguments: tuple[str, ...] = ("--dtype", "float32")
    router: dict[str, Any] = field(default_factory=dict)

    def serve_arguments(self, folder: Path) -> list[str]:
        """Return arguments of `vllm serve`; write the drafter's checkpoint."""
        drafter = {"model": str(self.head(folder / "head"))} if self.head else {}
        settings = json.dumps({**self.speculative, **drafter})
        return [*self.arguments, *(["--speculative-config", settings] if self.speculative else [])]


_DUMMY = ("--dtype", "bfloat16", "--load-format", "dummy")
_OSS = Case(gpt_oss, blocks=400, arguments=_DUMMY, router={"tokenizers": ((MODEL, "pods"),)})
CASES = [
    pytest.param(Case(llama), id="plain"),
    pytest.param(Case(llama, block_tokens=64, blocks=128), id="plain-64"),
    pytest.param(Case(llama, _NGRAM), id="ngram"),
    pytest.param(Case(hybrid, blocks=400), id="window"),
    pytest.param(Case(llama, _EAGLE, eagle_head), id="eagle"),
    pytest.param(Case(hybrid, _EAGLE, eagle_head, blocks=500), id="eagle-window"),
    pytest.param(Case(eight_layers, _EAGLE3, eagle3_head, block_tokens=64, blocks=128), id="eagle3-64"),
    pytest.param(Case(glm4_moe, _MTP, arguments=_DUMMY), id="mtp"),
    pytest.param(_OSS, id="gpt-oss"),
    pytest.param(Case(llama, ranks=2), id="two-ranks"),
]


@dataclass(frozen=True, slots=True)
class Beside:
    """Engine with its published events, and the router beside it."""

    case: Case
    published: Published
    router: RouterServer
    door: Door

    def await_events(self) -> None:
        """Wait until the router has applied all that the engine has to publish."""
        batches = self.published.receive_all()
        wait_until(lambda: applied_batches(self.router) >= batches, "the engine's events are applied")


@pytest.fixture(scope="module", params=CASES)
def beside(
    request: pytest.FixtureRequest, executables: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    """Run an engine, and beside it a router that is ready with its view."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp("engine")
    checkpoint, arguments = case.checkpoint(folder / "model"), case.serve_arguments(folder)
    sizes = {"blocks": case.blocks, "block_tokens": case.block_tokens, "ranks": case.ranks}
    with running_engine(executables, checkpoint, *arguments, **sizes) as engine:
        pods = write_pods(folder / "pods.yaml", [f"{HERE}:{engine.port}"], **engine.labels)
        # Predictions are judged, not times: a busy machine may tokenize slowly.
        settings = {"responses_full": True, "tokenize_deadline_s": 10.0, **case.router}
        with running_router(pods, index=IndexerConfig(), refresh_interval_s=1.0, **settings) as router:
            wait_until(lambda: ready_pods(router) and get(router, "/ready")[0] == 200, "the router is ready")
            published = Published(engine.replay_endpoints, case.block_tokens)
            with Door(router, engine.post) as door, closing(published):
                yield Beside(case, published, router, door)


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
    beside.published.receive_all()
    wrong = differing(served, speculative=bool(beside.case.speculative))
    unequal = [one for one in served if not one.is_equal]
    sums = f"{sum(one.predicted for one in served)} / {sum(one.delivered for one in served)} tokens"
    hits = sum(one.delivered > 0 for one in served)
    figure(f"{request.node.callspec.id}: {len(unequal)} of {len(served)} differ, {hits} hits, {sums}")
    for one in unequal:
        cause = beside.published.cause(one) if one in wrong else "not learned yet"
        figure(f"  {one.predicted} predicted, {one.delivered} of {len(one.prompt)} delivered: {cause}")
    assert hits, "no request hit the cache"
    assert len(wrong) <= (1 - least) * len(served)
