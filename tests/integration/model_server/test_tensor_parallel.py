"""An engine on two ranks: the same outputs as on one, and no process outlives the other."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import urllib3

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.errors import AdapterError, ConfigError, EngineClosedError, ModelError, WorkerError
from model_server.requests import EngineCoreRequest
from model_server.shapes.shape import ModelRank
from model_server.worker.workers import Start, WorkerProcesses
from tests.integration.model_server.test_engine_architectures import ARCHITECTURES
from tests.integration.model_server.test_engine_model import conversation
from tests.integration.model_server.test_process import started
from tests.support.model_server.engine import EventLog, Outputs, cached_copies, request, run_to_end
from tests.support.model_server.http import exit_code, wait_until
from tests.support.model_server.lora import save_adapter
from tests.support.model_server.model import save_reference, text_of

SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, changes) for name, changes in ARCHITECTURES.items()},
    "llama with one KV head and biases": ("llama", {"num_key_value_heads": 1, "attention_bias": True}),
}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]
DEADLINE_S = 300.0  # two processes load the libraries one after the other
TWO = ("--tensor-parallel-size", "2", "--torch-threads", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def engine_of(config: EngineConfig, size: int, events: EventLog | None = None) -> Iterator[EngineCore]:
    """Yield an engine with this many ranks."""
    engine = build_engine(
        replace(config, tensor_parallel_size=size, torch_threads=1), events and events.publish
    )
    try:
        yield engine
    finally:
        engine.close()


def answers(engine: EngineCore, requests: list[EngineCoreRequest]) -> Outputs:
    """Run requests together and return their outputs."""
    outputs = Outputs()
    for item in requests:
        engine.add_request(item, outputs)
    run_to_end(engine)
    return outputs


@pytest.mark.parametrize("name", SHAPES)
def test_answers_equal_transformers(tmp_path: Path, name: str) -> None:
    """On two ranks, greedy outputs equal those of transformers: chunked, batched, preempted and cached.

    Log probabilities are equal up to the order of summation.
    """
    architecture, changes = SHAPES[name]
    reference = save_reference(tmp_path, architecture, **changes)
    config = EngineConfig(
        model=str(tmp_path),
        block_tokens=4,
        gpu_blocks={"qwen2": 27, "gemma3": 20}.get(name, 22),
        max_model_len=52,
        max_num_seqs=4,
        max_num_batched_tokens=11,
    )
    system = text_of(17)
    prompts = {f"r{number}": system + text_of(3 + 5 * number, number + 1) for number in range(4)}
    prompts["again"] = prompts["r3"]
    with engine_of(config, 2) as engine:
        outputs = answers(
            engine,
            [
                request(name, prompt, max_tokens=14, ignore_eos=True, logprobs=20)
                for name, prompt in prompts.items()
            ],
        )
        assert engine.stats().preemptions > 0
        assert engine.stats().prefix_hits_tokens > 0
    for name, prompt in prompts.items():
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert outputs.tokens[name] == expected.sequences[0, len(prompt) :].tolist()
        for top, logits in zip(outputs.logprobs[name], expected.logits, strict=True):
            logprobs = logits[0].log_softmax(-1)
            assert top == pytest.approx({token: logprobs[token].item() for token in top}, abs=5e-4)
            assert len(top) == 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_tiers_and_aborts_work_on_all_ranks(device: str, kv_cache_dtype: str) -> None:
    """Swaps, restores, aborts and sleep on two ranks give the same outputs as on one."""
    config = EngineConfig(
        device=device,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        gpu_blocks=14,
        max_model_len=160,
        cpu_blocks=64,
        preemption_mode="swap",
    )
    choices = [replace(conversation()[1], request_id=name) for name in ("first", "second")]
    items = [*conversation(), request("gone", range(3, 60), 100)]
    got, bytes_of_block = {}, {}
    for size in (1, 2):
        events = EventLog()
        with engine_of(config, size, events) as engine:
            copied = answers(engine, choices)
            outputs = Outputs()
            for item in items:
                engine.add_request(item, outputs)
            for _ in range(4):
                engine.step()
            engine.abort_request("gone")
            run_to_end(engine)
            assert engine.stats().preemptions > 0
            assert engine.stats().swapped_in_blocks > 0
            assert events.mirror == cached_copies(engine)
            assert outputs.last["gone"].finish_reason == "abort"
            del outputs.tokens["gone"]
            again = answers(engine, conversation())
            assert engine.sleep()
            assert engine.wake_up()
            awake = answers(engine, conversation())
            got[size] = [one.tokens for one in (copied, outputs, again, awake)]
            bytes_of_block[size] = engine.stats().block_bytes
    assert got[2] == got[1]
    assert got[2][0]["second"] == got[2][0]["first"]
    assert bytes_of_block[2] == bytes_of_block[1]


def test_adapters_are_loaded_on_all_ranks(tmp_path: Path) -> None:
    """Each request uses its own adapter on all ranks, after a reload the new one; a misfit is rejected."""
    base = save_reference(tmp_path / "base")
    directories = {
        name: save_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("a", "b"))
    }
    wide = save_adapter(tmp_path / "wide", base, r=4)
    prompt = tuple(text_of(21))
    got = []
    for size in (1, 2):
        config = EngineConfig(model=str(tmp_path / "base"), block_tokens=4, gpu_blocks=64)
        with engine_of(config, size) as engine:
            with pytest.raises(AdapterError, match="has shape"):
                engine.loras.load("wide", wide)
            for name, directory in directories.items():
                engine.loras.load(name, directory)
            asked = {
                str(name): EngineCoreRequest(
                    str(name), prompt, request("", prompt, 6, ignore_eos=True).sampling, None, name
                )
                for name in (None, *directories)
            }
            first = answers(engine, list(asked.values()))
            engine.loras.unload("a")
            engine.loras.load("a", directories["b"])
            got.append((first.tokens, answers(engine, [asked["a"], asked["b"]]).tokens))
    assert got[0] == got[1]
    (first_tokens, later) = got[1]
    assert len({tuple(tokens) for tokens in first_tokens.values()}) == 3
    assert later["a"] == later["b"] == first_tokens["b"]


def test_a_lost_rank_is_noticed_without_requests() -> None:
    """Killing a worker process makes even an idle engine unhealthy, and new requests are rejected."""
    engine = build_engine(EngineConfig(tensor_parallel_size=2, torch_threads=1))
    others = set(threading.enumerate())
    engine.start()
    (stepping,) = (thread for thread in set(threading.enumerate()) - others if thread.name == "engine")
    (other,) = children(os.getpid())
    os.kill(other, signal.SIGKILL)
    wait_until(lambda: not stepping.is_alive())
    assert not engine.stats().healthy
    with pytest.raises(EngineClosedError):
        engine.add_request(request("a", [5, 6, 7]), Outputs())
    engine.close()


def test_rank_0_reports_load_errors_of_other_ranks(tmp_path: Path) -> None:
    """Rank 0 reports another rank's load error, or its early exit."""
    start = Start(EngineConfig(model=str(tmp_path / "nowhere")), ModelRank(1, 2), 30)
    workers = WorkerProcesses([start], on_loss=lambda: None)
    try:
        with pytest.raises(ModelError, match="nowhere: no such model directory"):
            workers.read_results()
        with pytest.raises(WorkerError, match=r"rank 1 of the model \(process \d+\) ended with exit code 1"):
            workers.read_results()
    finally:
        workers.close()


def test_model_that_cannot_be_split_is_rejected() -> None:
    """A model that cannot be split names the possible sizes and leaves no process."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3.*use one of 1, 2, 4, 8"):
        build_engine(EngineConfig(tensor_parallel_size=3, torch_threads=1))
    assert children(os.getpid()) == []


def children(pid: int) -> list[int]:
    """Return the running worker processes of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == pid and b"model_server.worker.workers" in command:
            found.append(int(status.parent.name))
    return found


def gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("killed", ["a rank", "rank 0", "none"])
def test_processes_of_a_server_end_together(tmp_path: Path, killed: str) -> None:
    """A lost rank ends the server with exit code 1; all processes end with rank 0 or at a stop."""
    with started(tmp_path, *TWO, deadline_s=DEADLINE_S) as (process, url):
        (other,) = children(process.pid)
        body = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True, "stream": True}
        answer = urllib3.request("POST", f"{url}/v1/completions", json=body, preload_content=False)
        stream = answer.stream()
        next(stream)
        if killed == "a rank":
            os.kill(other, signal.SIGKILL)
            assert b'"error"' in b"".join(stream)
            assert process.wait(DEADLINE_S) == 1
            log = (tmp_path / "log").read_text()
            assert f"rank 1 of the model (process {other}) ended by SIGKILL" in log
            assert "error: the engine failed" in log
        elif killed == "rank 0":
            process.kill()
        else:
            os.kill(other, signal.SIGTERM)  # as a stop of the whole process group does
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            assert "Traceback" not in (tmp_path / "log").read_text()
        wait_until(lambda: gone(other))


def test_start_up_errors_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that cannot be loaded is reported once, whatever the number of ranks."""
    assert exit_code("--port", "0", *TWO, "--no-kv-events", "--model", str(tmp_path)) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1
