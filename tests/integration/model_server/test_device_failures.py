"""A real model whose device fails: what is survived, and how the process ends."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import urllib3

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.errors import AdapterError, ConfigError, WorkerError
from model_server.worker import model_runner
from tests.integration.model_server.test_engine_model import conversation, generate
from tests.integration.model_server.test_process import started
from tests.support.model_server.engine import Outputs, request, run_to_end
from tests.support.model_server.http import DEADLINE_S, wait_until

ILLEGAL = "CUDA error: an illegal memory access was encountered"
FATAL = [
    torch.AcceleratorError(ILLEGAL),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    WorkerError("rank 1 of the model ended by SIGKILL"),
]
SURVIVED = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ValueError("the grammar has no next token"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    AdapterError("/adapters/CUDA: no such directory"),
]
# A model server whose fifth step fails as on a GPU.
FAILING_SERVER = f"""
import sys, torch
from model_server.cli import main
from model_server.worker.model_runner import ModelRunner

compute, steps = ModelRunner.execute_model, []

def execute_model(self, *args):
    steps.append(None)
    if len(steps) == 5:
        raise torch.AcceleratorError("{ILLEGAL}")
    return compute(self, *args)

ModelRunner.execute_model = execute_model
sys.exit(main())
"""


@pytest.fixture
def engine() -> Iterator[EngineCore]:
    """Yield an engine that takes its CPU for a device that computes asynchronously."""
    torch.set_num_threads(1)
    before_s = sys.getswitchinterval()
    built = build_engine(EngineConfig(gpu_blocks=64, max_model_len=256))
    built.executor.is_async = True
    yield built
    built.close()
    sys.setswitchinterval(before_s)


def test_an_asynchronous_engine_gives_the_same_tokens(engine: EngineCore) -> None:
    """A model's greedy, sampled and cached outputs are the same, whether or not steps are launched first."""
    other = build_engine(EngineConfig(gpu_blocks=64, max_model_len=256))
    assert generate(engine, conversation()).tokens == generate(other, conversation()).tokens


@pytest.mark.parametrize("error", FATAL, ids=str)
def test_a_device_error_is_fatal(engine: EngineCore, error: Exception) -> None:
    """Every error of a device or rank except out-of-memory becomes a WorkerError with its reason."""
    with pytest.raises(WorkerError) as caught:
        engine.executor.raise_if_fatal(error)
    assert str(error) in str(caught.value)


@pytest.mark.parametrize("error", SURVIVED, ids=str)
def test_other_errors_are_survived(engine: EngineCore, error: Exception) -> None:
    """Lack of device memory, and errors that are not the device's, end no engine."""
    engine.executor.raise_if_fatal(error)
    engine.executor.check_health()


def test_a_cpu_survives_what_only_names_a_device(engine: EngineCore) -> None:
    """On a CPU the text of an ordinary exception decides nothing."""
    engine.executor.is_async = False
    engine.executor.raise_if_fatal(RuntimeError(ILLEGAL))
    engine.executor.check_health()


@pytest.mark.parametrize("place", ["model.forward", "copies.store"])
def test_lack_of_memory_ends_only_the_requests(
    engine: EngineCore, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that ran out of device memory in a step or in a transfer runs the next request."""
    engine = build_engine(EngineConfig(gpu_blocks=16, max_model_len=256, cpu_blocks=16))
    engine.executor.is_async = True
    owner, name = place.split(".")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    outputs = Outputs()
    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr(getattr(engine.executor.runner, owner), name, full)
        engine.add_request(request("a", range(3, 40), max_tokens=1), outputs)
        engine.add_request(request("b", range(50, 60), max_tokens=9, ignore_eos=True), outputs)
        run_to_end(engine)
    assert "CUDA out of memory" in (outputs.last["b"].error or "")
    engine.add_request(request("c", range(3, 40), max_tokens=2, ignore_eos=True), outputs)
    run_to_end(engine)
    assert outputs.last["c"].finish_reason == "length"


def test_a_device_that_fails_on_another_thread_ends_an_idle_engine(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device error while an adapter is loaded makes the engine unhealthy before the next request."""

    def broken(*_: object) -> str:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(engine.executor.runner, "load_adapter", broken)
    with caplog.at_level(logging.CRITICAL):
        engine.start()
        with pytest.raises(WorkerError, match="illegal memory access"):
            engine.loras.load("sql", Path("sql"))
        wait_until(lambda: not engine.stats().healthy)
        wait_until(lambda: "illegal memory access" in caplog.text)  # logged a moment later


def test_a_device_that_fails_between_two_steps_ends_the_engine(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device error during wake_up is raised to the caller and ends the engine."""

    def broken(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    with caplog.at_level(logging.CRITICAL + 1):
        engine.start()
        assert engine.sleep()
        monkeypatch.setattr(engine.executor.runner, "allocate", broken)
        with pytest.raises(torch.AcceleratorError):
            engine.wake_up()
        wait_until(lambda: not engine.stats().healthy)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ConfigError),
        (torch.AcceleratorError("CUDA error: out of memory"), ConfigError),  # of pinned host memory
        (torch.AcceleratorError(ILLEGAL), WorkerError),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), WorkerError),
    ],
    ids=str,
)
def test_only_a_lack_of_memory_lets_an_engine_wake_up_later(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    """Without memory an engine stays asleep and wakes up once there is some; another error is fatal."""

    def broken(*_: object, **__: object) -> None:
        raise error

    assert engine.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(model_runner, "new_attention", broken)
        patched.setattr(engine.executor.runner.model, "device", torch.device("cuda"))
        with pytest.raises(kind) as caught:
            engine.wake_up()
        assert str(error) in str(caught.value)
    if kind is ConfigError:
        assert engine.is_sleeping
        assert engine.wake_up()
        assert generate(engine, conversation()).tokens


def test_a_thread_is_bound_to_the_named_gpu(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device cuda:1 the device is made current by the engine's thread and a loader of adapters."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    runner = engine.executor.runner
    engine.executor.bind_thread()
    assert current == []
    monkeypatch.setattr(runner.model, "device", torch.device("cuda:1"))
    engine.executor.bind_thread()
    with pytest.raises(AdapterError):
        runner.load_adapter("/nowhere", 1)
    assert current == [torch.device("cuda:1")] * 2
    monkeypatch.setattr(runner.model, "device", torch.device("cuda"))
    engine.executor.bind_thread()
    assert len(current) == 2
    monkeypatch.undo()


def test_a_failed_device_ends_the_process(tmp_path: Path) -> None:
    """After a device error the server ends with status 1 and its reason; /health is never 200 again."""
    with started(tmp_path, command=[sys.executable, "-c", FAILING_SERVER]) as (process, url):
        with urllib3.PoolManager(retries=False) as http:
            assert http.request("GET", f"{url}/health").status == 200
            body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
            answer = http.request("POST", f"{url}/v1/completions", json=body, preload_content=False)
            assert b'"error"' in b"".join(answer.stream())
            answers = set()
            while process.poll() is None:
                try:
                    answers.add(http.request("GET", f"{url}/health", timeout=DEADLINE_S).status)
                except urllib3.exceptions.HTTPError:
                    continue
        assert answers <= {503}
        assert process.wait(DEADLINE_S) == 1
    log = (tmp_path / "log").read_text()
    assert f"the device failed and does not recover: {ILLEGAL}" in log
    assert log.endswith("kvroute model-server: error: the engine failed; see the log\n")
