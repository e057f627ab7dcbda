"""Files that one request and one event enter between socket and socket, traced in a running router."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import grpc
from envoy.service.auth.v3 import external_auth_pb2_grpc
from numba.core.dispatcher import Dispatcher

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
    """Profiler that collects the product files that each thread enters while `is_on`.

    numba reports calls of compiled kernels too; they are not counted.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._files: dict[int, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self.is_on or event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            file = path.relative_to(ROOT)
            if file.parts[0] in _PACKAGES and not _is_kernel(frame.f_code, file):
                self._files.setdefault(threading.get_ident(), set()).add(str(file))

    def entered(self, folder: str) -> set[str]:
        """Return the files of all threads that entered a folder."""
        ways = [files for files in self._files.values() if any(file.startswith(folder) for file in files)]
        return set().union(*ways)


def _is_kernel(code: CodeType, file: Path) -> bool:
    module = sys.modules[".".join(file.with_suffix("").parts)]
    return isinstance(getattr(module, code.co_name, None), Dispatcher)


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
