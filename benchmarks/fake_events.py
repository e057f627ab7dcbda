"""Event publishers of the fake pods, on one thread: they publish blocks that were never computed.

`python -m benchmarks.fake_events EVENTS_PORT REPLAY_PORT COUNT BODIES`. Every second pod has the prompts of
BODIES (a file with one chat body per line) cached from the start. Each line on stdin is the number of blocks
per second that all pods together store from then on, in runs of 32. Like engines, a pod publishes the blocks
of each 20 ms step as one batch. Wire format and replay are the model server's. Engines are left out, because
they would use CPU of the measured machine.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from random import Random

import zmq

from benchmarks.fake_pod import model_directory
from model_server.kv_events.events import MEDIUM_GPU, BlockStored, ExternalBlockHash
from model_server.kv_events.replay import PublisherStats, ReplayBuffer, ReplayServer
from tokenization import PromptTokenizer
from tokenization.prompts import chat_prompt

BLOCK_TOKENS = 16
_RUN_BLOCKS = 32
_STEP_S = 0.02
# Steps are staggered: a quarter of the pods ends a step at the same time.
_PHASES = 4
_BATCHES_KEPT = 10_000
# Same length on the wire as a real model's token ids.
_VOCABULARY = 150_000
_HASH_FACTOR, _HASH_MASK = 0x9E37_79B9_7F4A_7C15, (1 << 64) - 1


class _Pod:
    """Sockets of one pod; the blocks of all its steps form one chain."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], events_port: int, replay_port: int) -> None:
        self._ring = ReplayBuffer(_BATCHES_KEPT)
        self._events = context.socket(zmq.PUB)
        self._events.set_hwm(_BATCHES_KEPT)
        self._events.bind(f"tcp://127.0.0.1:{events_port}")
        replay = context.socket(zmq.ROUTER)
        ReplayServer.limit(replay)
        replay.bind(f"tcp://127.0.0.1:{replay_port}")
        self.replay = ReplayServer(replay, b"", self._ring, PublisherStats())
        self._stored = 0
        self._parent: ExternalBlockHash | None = None

    def holds(self, token_ids: list[int]) -> None:
        """Store all full blocks of a prompt."""
        blocks = len(token_ids) // BLOCK_TOKENS
        self._publish([self._store(None, token_ids[: blocks * BLOCK_TOKENS], blocks)])

    def steps(self, runs: Sequence[list[int]]) -> None:
        """Store runs of blocks in one step, each after the previous one."""
        stored = []
        for token_ids in runs:
            stored.append(self._store(self._parent, token_ids, _RUN_BLOCKS))
            self._parent = stored[-1].block_hashes[-1]
        self._publish(stored)

    def _store(self, parent: ExternalBlockHash | None, token_ids: list[int], blocks: int) -> BlockStored:
        numbers = range(self._stored + 1, self._stored + blocks + 1)
        self._stored += blocks
        hashes = [number * _HASH_FACTOR & _HASH_MASK for number in numbers]
        return BlockStored(hashes, parent, token_ids, BLOCK_TOKENS, None, MEDIUM_GPU, None)

    def _publish(self, events: Sequence[BlockStored]) -> None:
        step = self._ring.append(time.time(), events)
        self._events.send_multipart((b"", step.sequence_frame, step.payload()))


def main(events_port: int, replay_port: int, number: int, bodies: Path) -> None:
    """Publish until the process is killed or its standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * number + 64)
    pods = [_Pod(context, events_port + at, replay_port + at) for at in range(number)]
    tokenizer = PromptTokenizer.from_directory(model_directory(bodies))
    for body in bodies.read_bytes().splitlines():
        prompt = [int(token) for token in chat_prompt(json.loads(body), tokenizer)]
        for pod in pods[::2]:
            pod.holds(prompt)
    _store_at_will(pods)


def _store_at_will(pods: Sequence[_Pod]) -> None:
    rate = [0.0]
    threading.Thread(target=_read_rates, args=(rate,), daemon=True).start()
    random = Random(0)
    runs = [[random.randrange(_VOCABULARY) for _ in range(BLOCK_TOKENS * _RUN_BLOCKS)] for _ in range(64)]
    replays = _Replays(pods)
    phases = [pods[at::_PHASES] for at in range(min(_PHASES, len(pods)))]
    due_blocks, then_s = 0.0, time.monotonic()
    for phase in cycle(phases):
        replays.serve_until(then_s + _STEP_S / len(phases))
        now_s = time.monotonic()
        due_blocks += rate[0] * (now_s - then_s)
        then_s = now_s
        shares: defaultdict[_Pod, list[list[int]]] = defaultdict(list)
        while due_blocks >= _RUN_BLOCKS:
            due_blocks -= _RUN_BLOCKS
            shares[random.choice(phase)].append(random.choice(runs))
        for pod, share in shares.items():
            pod.steps(share)


class _Replays:
    """Replay server of past batches for all pods."""

    def __init__(self, pods: Sequence[_Pod]) -> None:
        self._poller = zmq.Poller()
        self._servers = {pod.replay.socket: pod.replay for pod in pods}
        for replay in self._servers:
            self._poller.register(replay, zmq.POLLIN)
        self._open: set[ReplayServer] = set()

    def serve_until(self, until_s: float) -> None:
        """Serve all pods until the deadline; unfinished replays continue in the next call."""
        while True:
            left_ms = max(0, math.ceil(1000 * (until_s - time.monotonic())))
            asked = {self._servers[ready] for ready, _ in self._poller.poll(left_ms)}
            now_s = time.monotonic()
            self._open = {server for server in self._open | asked if server.serve(now_s) is not None}
            if now_s >= until_s:
                return


def _read_rates(rate: list[float]) -> None:
    for line in sys.stdin:
        rate[0] = float(line)
    # The parent has ended: exit, so that no later index follows these pods.
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
