"""A real vLLM server on this machine's CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

from tests.support.loopback import HERE, free_base
from tests.support.router.doors import wait_until

MODEL = "kvroute-tiny"
# Offsets from the serving port; each data-parallel rank adds its number.
_EVENTS, _REPLAY = 10, 20
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_CPU = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True, slots=True)
class Engine:
    """Running vLLM with KV events, whose usage has the cached tokens of each request."""

    port: int
    ranks: int
    http: urllib3.PoolManager

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its entry in a pods file."""
        ports = {"events-port": self.port + _EVENTS, "replay-port": self.port + _REPLAY, "ranks": self.ranks}
        return {"kvroute.io/model": MODEL} | {f"kvroute.io/kv-{name}": str(it) for name, it in ports.items()}

    @property
    def replay_endpoints(self) -> list[str]:
        """ZMQ endpoints of the ranks' replays."""
        return [f"tcp://{HERE}:{self.port + _REPLAY + rank}" for rank in range(self.ranks)]

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Return the answer to a request."""
        url = f"http://{HERE}:{self.port}{path}"
        answer = self.http.request("POST", url, json=body, headers=headers, timeout=60, retries=False)
        assert answer.status == 200, answer.data[:500]
        answered: dict[str, Any] = answer.json()
        return answered


@contextmanager
def running_engine(
    executables: Path, checkpoint: Path, *arguments: str, blocks: int, block_tokens: int, ranks: int = 1
) -> Iterator[Engine]:
    """Run `vllm serve` on free ports until it is healthy; its log is vllm.log beside the checkpoint."""
    port = free_base([0, *(offset + rank for offset in (_EVENTS, _REPLAY) for rank in range(ranks))])
    endpoints = {"endpoint": f"tcp://*:{port + _EVENTS}", "replay_endpoint": f"tcp://*:{port + _REPLAY}"}
    events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **endpoints})
    flags = (
        f"--served-model-name {MODEL} --host {HERE} --port {port} --data-parallel-size {ranks} "
        f"--block-size {block_tokens} --num-gpu-blocks-override {blocks} --max-model-len 4096 "
        "--max-num-seqs 16 --enforce-eager --enable-prompt-tokens-details --enable-scale-out"
    )
    command = [f"{executables}/vllm", "serve", str(checkpoint), *flags.split(), "--kv-events-config", events]
    path = f"{executables}:{os.environ['PATH']}"
    environment = {**os.environ, **_OFFLINE, **_CPU, "OMP_NUM_THREADS": "1", "PATH": path}
    log_path = checkpoint.with_name("vllm.log")
    with log_path.open("wb") as log:
        settings: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([*command, *arguments], env=environment, **settings)

    def is_healthy() -> bool:
        assert process.poll() is None, log_path.read_text(errors="replace")[-4000:]
        try:
            return http.request("GET", f"http://{HERE}:{port}/health", retries=False, timeout=5).status == 200
        except urllib3.exceptions.HTTPError:
            time.sleep(0.5)
            return False

    with urllib3.PoolManager(maxsize=16) as http:
        try:
            wait_until(is_healthy, f"vLLM is healthy, see {log_path}")
            yield Engine(port, ranks, http)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            # Its workers are of its process group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
