"""Real engines, and beside them a router that is ready with its views of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexer import IndexerConfig
from router.app.server import RouterServer
from router.doors.boundary import DESTINATION_HEADER
from tests.support.engines.door import Door, applied_batches
from tests.support.engines.engine import running_engine
from tests.support.engines.published import Published
from tests.support.loopback import HERE
from tests.support.router.doors import wait_until
from tests.support.router.server import get, ready_pods, running_router

EAGLE = {"method": "eagle", "num_speculative_tokens": 2}


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


@dataclass(frozen=True, slots=True)
class Beside:
    """Engines of one kind with their published events, and the router beside them."""

    case: Case
    addresses: list[str]
    published: list[Published]
    router: RouterServer
    door: Door

    def await_events(self) -> None:
        """Wait until the router has applied all that the engines have to publish."""
        batches = sum(published.receive_all() for published in self.published)
        wait_until(lambda: applied_batches(self.router) >= batches, "the engine's events are applied")


@contextmanager
def running_beside(case: Case, executables: Path, folder: Path, engines: int = 1) -> Iterator[Beside]:
    """Run engines, and beside them a router that is ready with its views."""
    sizes = {"blocks": case.blocks, "block_tokens": case.block_tokens, "ranks": case.ranks}
    with ExitStack() as stack:
        running = {}
        for number in range(engines):
            (home := folder / f"engine-{number}").mkdir()
            checkpoint, arguments = case.checkpoint(home / "model"), case.serve_arguments(home)
            engine = stack.enter_context(running_engine(executables, checkpoint, *arguments, **sizes))
            running[f"{HERE}:{engine.port}"] = engine
        pods = [
            {"name": f"engine-{engine.port}", "address": HERE, "port": engine.port, "labels": engine.labels}
            for engine in running.values()
        ]
        (pods_file := folder / "pods.yaml").write_text(json.dumps({"endpoints": pods}))
        # Predictions are judged, not times: a busy machine may tokenize slowly.
        settings = {"responses_full": True, "tokenize_deadline_s": 10.0, **case.router}
        router = stack.enter_context(
            running_router(pods_file, index=IndexerConfig(), refresh_interval_s=1.0, **settings)
        )
        wait_until(
            lambda: len(ready_pods(router)) == engines and get(router, "/ready")[0] == 200,
            "the router is ready",
        )
        published = [Published(engine.replay_endpoints, case.block_tokens) for engine in running.values()]
        for one in published:
            stack.enter_context(closing(one))

        def serve(path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
            return running[headers[DESTINATION_HEADER]].post(path, body, headers)

        yield Beside(case, list(running), published, router, stack.enter_context(Door(router, serve)))
