"""Snapshots of a real engine under load: snapshot plus later events equal the full event history."""

from __future__ import annotations

import random
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.flags import add_flags
from indexer import IndexerConfig, KvIndexer, PodStream, StreamState
from indexer.config import index_config
from indexer.pod_entry import PodEntry
from indexer.streams.snapshot import Snapshot, read_snapshot
from model_server.kv_events.events import KVEventBatch
from tests.integration.model_server.openai.test_events import replayed, resident
from tests.support.model_server.http import (
    MODEL,
    RunningServer,
    running_server,
    subscription,
    wait_until,
)

POD = "10.0.0.1:8000"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """Yield a server with so few blocks that it evicts continuously."""
    with running_server(gpu_blocks=48, max_model_len=512) as running:
        yield running


@contextmanager
def load(server: RunningServer) -> Iterator[list[list[int]]]:
    """Send prompts with shared prefixes from several clients until the block exits; yield the prompts."""
    stopping = threading.Event()
    prompts: list[list[int]] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        while not stopping.is_set():
            prompt = [dice.randrange(3)] * 64 + [dice.randrange(200) for _ in range(dice.randrange(200))]
            prompts.append(prompt)
            response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
            assert response.status == 200

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield prompts
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def snapshot(server: RunningServer) -> Snapshot:
    """Return the server's snapshot."""
    response = server.admin("GET", "/kv_events/snapshot")
    assert (response.status, response.headers["content-type"]) == (200, "application/msgpack")
    told = read_snapshot(response.data)
    assert isinstance(told, Snapshot)
    return told


def batches(told: Snapshot) -> list[KVEventBatch]:
    """Return the snapshot's batches."""
    return [msgspec.msgpack.decode(payload, type=KVEventBatch) for payload in told.batches]


def test_snapshot_equals_all_events_before_it(server: RunningServer) -> None:
    """Each snapshot taken under load equals the view built from all batches before it."""
    taken: list[Snapshot] = []
    with load(server):
        for _ in range(12):
            published = server.publisher.stats.published
            wait_until(lambda seen=published: server.publisher.stats.published > seen + 3)  # type: ignore[misc]
            taken.append(snapshot(server))
    with subscription(server) as client:
        history = replayed(client)
    assert len({told.boot_id for told in taken}) == 1
    assert len({told.sequence for told in taken}) == len(taken)
    for told in taken:
        assert told.blocks == sum(n for n in resident(history[: told.sequence]).values() if n)
        assert held(batches(told)) == held(history[: told.sequence])


def held(history: list[KVEventBatch]) -> dict[tuple[int, ...], int]:
    """Return the number of copies of each cached block."""
    return {chain: copies for chain, copies in resident(history).items() if copies}


def test_late_index_from_a_snapshot_equals_one_with_all_events(server: RunningServer) -> None:
    """An index started late from a snapshot, without replay, equals one that received all events."""
    config = server.publisher.config
    events = "tcp://127.0.0.1:" + config.endpoint.rsplit(":", 1)[1]
    url = server.admin_url + "/kv_events/snapshot"

    def follow(stream: PodStream) -> KvIndexer:
        indexer = KvIndexer(IndexerConfig(hash_seed=1), registry=CollectorRegistry())
        indexer.start()
        indexer.follow([stream])
        wait_until(lambda: indexer.states() == {POD: StreamState.EXACT})
        return indexer

    def lengths(indexer: KvIndexer, prompts: list[list[int]]) -> list[int]:
        keys = [indexer.block_keys(MODEL, prompt) for prompt in prompts]
        return [indexer.match(each, [POD])[POD].cached_blocks for each in keys]

    with (
        closing(follow(PodStream(POD, MODEL, events, config.replay_endpoint))) as whole,
        ExitStack() as cleanup,
    ):
        with load(server) as prompts:
            wait_until(lambda: len(prompts) > 20)
            late = cleanup.enter_context(closing(follow(PodStream(POD, MODEL, events, snapshot_url=url))))
            assert late.ready()
            wait_until(lambda: len(prompts) > 40)
        wait_until(server.idle)
        wait_until(lambda: lengths(whole, prompts) == lengths(late, prompts))
        assert late.stats().blocks == whole.stats().blocks > 0
        assert late.states() == {POD: StreamState.EXACT}
        assert any(lengths(late, prompts))


def test_a_snapshot_is_followed_with_the_servers_token(tmp_path: Path) -> None:
    """With the server's token the router's stream is EXACT from the snapshot; without it there is no view."""
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    with running_server(admin_token="s3cret") as server:
        server.post("/v1/completions", {"prompt": [7] * 64, "max_tokens": 1})
        wait_until(server.idle)
        events = "tcp://127.0.0.1:" + server.publisher.config.endpoint.rsplit(":", 1)[1]
        host, port = server.url.removeprefix("http://").split(":")
        labels = {
            "kvroute.io/model": MODEL,
            "kvroute.io/kv-events-port": events.rsplit(":", 1)[1],
            "kvroute.io/kv-snapshot": "true",
            "kvroute.io/admin-port": server.admin_url.rsplit(":", 1)[1],
        }
        stream = PodEntry("a", "default", host, int(port), labels).stream()
        assert stream is not None
        for flags, state in ([f"--admin-token-file={secret}"], StreamState.EXACT), ([], StreamState.STALE):
            parser = ArgumentParser()
            add_flags(parser, IndexerConfig)
            config = index_config(parser.parse_args(flags))
            with closing(KvIndexer(config, registry=CollectorRegistry())) as indexer:
                indexer.start()
                indexer.follow([stream])
                wait_until(lambda: indexer.states() == {stream.pod: state})  # noqa: B023
                assert (indexer.stats().blocks > 0) == (state is StreamState.EXACT)
