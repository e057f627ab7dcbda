"""Files that one request and one event enter between socket and socket, traced in a running router."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import grpc
from envoy.service.auth.v3 import external_auth_pb2_grpc

from tests.support.indexer.engine_publisher import EnginePublisher
from tests.support.indexer.subscriber import Watched, block, stream
from tests.support.loopback import HERE
from tests.support.paths import ROOT
from tests.support.router.doors import TIMEOUT_S, wait_until
from tests.support.router.server import fake_pods, ready_pods, running_router, write_pods
from tests.wire.router.test_check import request

_PACKAGES = ("router", "indexer", "tokenization", "common")
_GUIDE = (ROOT / "docs/architecture.md").read_text("utf-8")
CHAT = b'{"model": "kvroute-tiny", "messages": [{"role": "user", "content": "Tell me of a small harbour."}]}'


class _Tracer:
    """Profiler that collects the product files that each thread enters while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._files: dict[int, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in _PACKAGES:
                entered = self._files.setdefault(threading.get_ident(), set())
                entered.add(str(path.relative_to(ROOT)))

    def entered(self, folder: str) -> set[str]:
        """Return the files of all threads that entered a folder."""
        ways = [files for files in self._files.values() if any(file.startswith(folder) for file in files)]
        return set().union(*ways)


@contextmanager
def _tracing() -> Iterator[_Tracer]:
    tracer, before = _Tracer(), threading.getprofile()
    threading.setprofile(tracer)
    try:
        yield tracer
    finally:
        threading.setprofile(before)


def _documented(what: str) -> int:
    found = re.search(rf"{what} enters (\d+) files", _GUIDE)
    assert found is not None
    return int(found[1])


def test_a_small_chat_enters_no_more_files_than_documented(tmp_path: Path) -> None:
    """The way of a chat from Envoy's socket to the answer stays as short as architecture.md says."""
    with (
        _tracing() as tracer,
        fake_pods(1) as (pod,),
        running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router,
        grpc.insecure_channel(f"{HERE}:{router.ports['grpc']}") as channel,
    ):
        wait_until(lambda: ready_pods(router), "readiness")
        check = external_auth_pb2_grpc.AuthorizationStub(channel).Check
        check(
            request(CHAT, "/v1/chat/completions"), timeout=TIMEOUT_S
        )  # the first request loads what all share
        tracer.is_on = True
        assert check(request(CHAT, "/v1/chat/completions"), timeout=TIMEOUT_S).status.code == 0
        tracer.is_on = False
    entered = tracer.entered("router/doors/ext_authz")
    assert {"tokenization/encoder.py", "router/picking/scheduler.py", "indexer/index/index.py"} <= entered
    assert len(entered) <= _documented("A small chat"), sorted(entered)


def test_an_event_enters_no_more_files_than_documented() -> None:
    """The way of an event from the engine's socket to the index stays as short as architecture.md says."""
    with _tracing() as tracer, EnginePublisher() as engine:
        watched = Watched()
        try:
            watched.follow(stream(engine))
            watched.settled(0)
            engine.publish(block(1))
            watched.settled(1)
            tracer.is_on = True
            engine.publish(block(2))
            watched.settled(2)
            tracer.is_on = False
        finally:
            watched.indexer.close()
    entered = tracer.entered("indexer/streams/subscriber.py")
    assert {"indexer/streams/state_machine.py", "indexer/views/applier.py"} <= entered
    assert len(entered) <= _documented("An event"), sorted(entered)
