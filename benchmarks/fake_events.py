"""The event side of the fake pods: real publishers that tell a cache which nobody computed.

`python -m benchmarks.fake_events EVENTS_PORT REPLAY_PORT COUNT BODIES`. Every second pod holds the prompts of
BODIES (a file with one chat body a line) from the start. Each line on stdin is a number of blocks per second
that all pods together store from then on, 32 blocks an event.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import count
from pathlib import Path
from random import Random

from model_server.events import MEDIUM_GPU, BlockStored
from model_server.publish import KVEventPublisher, KVEventsConfig
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.openai_prompts import begin_chat

BLOCK_TOKENS = 16
_RUN_BLOCKS = 32
_TICK_S = 0.01


class _Pod:
    """One pod's publisher, whose blocks are all of one chain."""

    def __init__(self, events_port: int, replay_port: int) -> None:
        config = KVEventsConfig(
            endpoint=f"tcp://127.0.0.1:{events_port}",
            replay_endpoint=f"tcp://127.0.0.1:{replay_port}",
            always_bind=True,
        )
        self._publisher = KVEventPublisher(config)
        self._publisher.start()
        self._hashes = count(1)
        self._parent: int | None = None

    def holds(self, token_ids: list[int]) -> None:
        """A whole prompt's full blocks."""
        blocks = len(token_ids) // BLOCK_TOKENS
        self._store(None, token_ids[: blocks * BLOCK_TOKENS], blocks)

    def stores(self, token_ids: list[int]) -> None:
        """A run of blocks after the last one."""
        self._parent = self._store(self._parent, token_ids, _RUN_BLOCKS)

    def _store(self, parent: int | None, token_ids: list[int], blocks: int) -> int:
        hashes = [next(self._hashes) for _ in range(blocks)]
        stored = BlockStored(hashes, parent, token_ids, BLOCK_TOKENS, None, MEDIUM_GPU, None)
        self._publisher.publish([stored])
        return hashes[-1]


def main(events_port: int, replay_port: int, number: int, bodies: Path) -> None:
    """Publishes until it is killed."""
    pods = [_Pod(events_port + at, replay_port + at) for at in range(number)]
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    for body in bodies.read_bytes().splitlines():
        prompt = [int(token) for token in begin_chat(json.loads(body), tokenizer).ids()]
        for pod in pods[::2]:
            pod.holds(prompt)
    _store_at_will(pods)


def _store_at_will(pods: list[_Pod]) -> None:
    rate = [0.0]
    threading.Thread(target=_read_rates, args=(rate,), daemon=True).start()
    random = Random(0)
    runs = [[random.randrange(256) for _ in range(BLOCK_TOKENS * _RUN_BLOCKS)] for _ in range(64)]
    due_blocks, then_s = 0.0, time.monotonic()
    while True:
        time.sleep(_TICK_S)
        now_s = time.monotonic()
        due_blocks += rate[0] * (now_s - then_s)
        then_s = now_s
        while due_blocks >= _RUN_BLOCKS:
            due_blocks -= _RUN_BLOCKS
            random.choice(pods).stores(random.choice(runs))


def _read_rates(rate: list[float]) -> None:
    for line in sys.stdin:
        rate[0] = float(line)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
