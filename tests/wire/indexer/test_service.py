"""Stand-alone indexer: gRPC in process, and the command as a process of its own."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from indexer import ListenError
from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.service.cli import main
from indexer.service.grpc_server import IndexerServer
from tests.support.indexer.bound import ConnectedEngine
from tests.support.indexer.engine_publisher import DEADLINE_S, EnginePublisher, stored, wait_until
from tests.support.indexer.subscriber import MODEL, OTHER, POD, ROOT, TOKENS, Watched, block, started, stream
from tokenization import TINY_DIRECTORY, PromptTokenizer

SERVICE = "kvroute.v1.IndexerService"


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer."""
    running = Watched()
    yield running
    running.indexer.close()


@pytest.fixture
def channel(watched: Watched) -> Iterator[grpc.Channel]:
    """Connect to a server that has a pod with 2 blocks and one with 5, one of them in host memory."""
    with EnginePublisher() as first, EnginePublisher() as second:
        streams = [stream(first), stream(second, OTHER)]
        first.publish(block(1), block(2))
        second.publish(*(block(number) for number in (1, 2, 3, 4)), block(5, medium="CPU"))
        watched.follow(*streams)
        watched.settled(2)
        watched.settled(5, pod=OTHER)
        server = IndexerServer(watched.indexer, streams, "127.0.0.1", 0)
        server.start()
        server.set_ready()
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as opened:
            yield opened
        server.close(0)


def score(channel: grpc.Channel, **request: object) -> pb.ScoreResponse:
    """Request the score of TOKENS, unless other fields are given."""
    return pb_grpc.IndexerServiceStub(channel).Score(
        pb.ScoreRequest(**{"model": MODEL, "token_ids": TOKENS, **request}), timeout=DEADLINE_S
    )


def test_pods_are_scored_best_first(channel: grpc.Channel) -> None:
    """Blocks, tokens, tiers, weights and the view's state are reported for each pod of the model."""
    response = score(channel)
    assert (response.block_tokens, response.prompt_blocks) == (4, 6)
    best, second = response.pods
    assert (best.pod, best.cached_blocks, best.cached_tokens) == (OTHER, 5, 20)
    assert dict(best.blocks_by_tier) == {"gpu": 4, "cpu": 1}
    assert best.weighted_blocks == pytest.approx(4.8)
    assert best.state == pb.STREAM_STATE_EXACT
    assert (second.pod, second.cached_blocks) == (POD, 2)


def test_named_pods_are_scored_alone(channel: grpc.Channel) -> None:
    """Only the requested pods are reported, whether known or not."""
    response = score(channel, pods=[POD, "10.0.0.9:1"])
    assert [(p.pod, p.cached_blocks, p.state) for p in response.pods] == [
        (POD, 2, pb.STREAM_STATE_EXACT),
        ("10.0.0.9:1", 0, pb.STREAM_STATE_STALE),
    ]


@pytest.mark.parametrize("other", [{"cache_salt": "tenant"}, {"lora_name": "sql"}])
def test_salts_and_adapters_are_other_prompts(channel: grpc.Channel, other: dict[str, str]) -> None:
    """Blocks of the base model are no hit for a request with a salt or an adapter."""
    assert {pod.cached_blocks for pod in score(channel, **other).pods} == {0}


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": "unknown"}, grpc.StatusCode.NOT_FOUND),
    ],
)
def test_what_cannot_be_scored_is_an_error(
    channel: grpc.Channel, request_fields: dict[str, str], code: grpc.StatusCode
) -> None:
    """A missing or unknown model has a status of its own and a message that names the field."""
    with pytest.raises(grpc.RpcError) as caught:
        score(channel, **request_fields)
    assert caught.value.code() is code
    assert caught.value.details().startswith("model")


def test_sizes_and_states_are_reported(channel: grpc.Channel) -> None:
    """Stats reports the index and every pod's stream."""
    stats = pb_grpc.IndexerServiceStub(channel).Stats(pb.StatsRequest(), timeout=DEADLINE_S)
    assert (stats.blocks, stats.holdings, stats.evicted_blocks) == (5, 7, 0)
    assert [(p.pod, p.model, p.state) for p in stats.pods] == [
        (POD, MODEL, pb.STREAM_STATE_EXACT),
        (OTHER, MODEL, pb.STREAM_STATE_EXACT),
    ]


def test_batches_are_scored_in_their_order(channel: grpc.Channel) -> None:
    """Prompts in one call have the same scores as alone; an invalid one fails the call."""
    stub = pb_grpc.IndexerServiceStub(channel)
    prompts = [pb.ScoreRequest(model=MODEL, token_ids=TOKENS[:length]) for length in (8, 24, 3)]
    batch = stub.ScoreBatch(pb.ScoreBatchRequest(prompts=prompts), timeout=DEADLINE_S)
    assert [response.pods[0].cached_blocks for response in batch.responses] == [2, 5, 0]
    assert list(batch.responses) == [stub.Score(prompt, timeout=DEADLINE_S) for prompt in prompts]
    with pytest.raises(grpc.RpcError, match="model"):
        stub.ScoreBatch(pb.ScoreBatchRequest(prompts=[*prompts, pb.ScoreRequest()]), timeout=DEADLINE_S)


def test_text_needs_a_tokenizer_and_is_what_its_tokens_are(watched: Watched) -> None:
    """A text prompt is tokenized as by the engine; without a tokenizer it is an error."""
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    text = "what caches hold"
    ids = tokenizer.encode(text)
    with EnginePublisher() as engine:
        engine.publish(stored([1], ids[:4]))
        watched.follow(stream(engine))
        server = IndexerServer(
            watched.indexer, [stream(engine)], "127.0.0.1", 0, tokenizers={MODEL: tokenizer}
        )
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = pb_grpc.IndexerServiceStub(channel)

            def blocks() -> int:
                asked = pb.ScoreRequest(model=MODEL, text=text)
                return int(stub.Score(asked, timeout=DEADLINE_S).pods[0].cached_blocks)

            wait_until("it is found", lambda: blocks() == 1)
            for wrong, code in (
                (pb.ScoreRequest(model=MODEL, text=text, token_ids=ids), grpc.StatusCode.INVALID_ARGUMENT),
                (pb.ScoreRequest(model="x", text=text, pods=[POD]), grpc.StatusCode.FAILED_PRECONDITION),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Score(wrong, timeout=DEADLINE_S)
                assert caught.value.code() is code
        server.close(0)


def test_where_a_prefix_ends_is_explained(channel: grpc.Channel, watched: Watched) -> None:
    """The explanation has the hole, the blocks behind it, the tiers in front of it, and the view's state."""
    asked = pb.ScoreRequest(model=MODEL, token_ids=TOKENS, pods=[POD, OTHER, "nobody"])
    explained = pb_grpc.IndexerServiceStub(channel).Explain(asked, timeout=DEADLINE_S)
    first, second, unknown = explained.engines
    assert (first.engine, first.cached_blocks, first.end) == (POD, 2, pb.PREFIX_END_HOLE)
    assert (second.held_blocks, second.held_beyond) == (5, 0)
    assert [(run.tier, run.blocks) for run in second.tiers] == [("gpu", 4), ("cpu", 1)]
    assert (unknown.state, unknown.reason) == (pb.STREAM_STATE_STALE, "not_followed")
    assert [(each.proven_blocks, each.end_proven) for each in explained.engines] == [
        (2, True),
        (5, True),
        (0, False),
    ]


def test_cleared_views_are_rebuilt(channel: grpc.Channel, watched: Watched) -> None:
    """A cleared view is rebuilt by a replay; unknown pods are rejected."""
    stub = pb_grpc.IndexerServiceStub(channel)
    assert stub.Clear(pb.ClearRequest(pods=[POD]), timeout=DEADLINE_S).pods == 1
    reason = {"reason": "cleared_by_hand"}
    wait_until("it is cleared", lambda: watched.metric("kvroute_indexer_pod_clears_total", **reason) == 1)
    watched.settled(2)
    assert stub.Clear(pb.ClearRequest(), timeout=DEADLINE_S).pods == 2
    with pytest.raises(grpc.RpcError, match="nobody"):
        stub.Clear(pb.ClearRequest(pods=["nobody"]), timeout=DEADLINE_S)


def test_an_indexer_is_not_ready_before_it_says_so(watched: Watched) -> None:
    """The server is healthy immediately, and its service once the views are built."""
    server = IndexerServer(watched.indexer, [], "127.0.0.1", 0)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status(service: str) -> int:
            return health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S).status

        assert status("") == health_pb2.HealthCheckResponse.SERVING
        assert status(SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        server.set_ready()
        assert status(SERVICE) == health_pb2.HealthCheckResponse.SERVING
    server.close(0)


def test_health_and_reflection_are_served(channel: grpc.Channel) -> None:
    """The server answers health checks by both names, and lists its services."""
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answer = next(stub.ServerReflectionInfo(iter([asked]), timeout=DEADLINE_S))
    assert SERVICE in {service.name for service in answer.list_services_response.service}


def test_a_port_in_use_is_an_error_that_names_the_flag(watched: Watched) -> None:
    """Two indexers cannot share a port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"--grpc-port {port}"):
            IndexerServer(watched.indexer, [], "127.0.0.1", port)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "indexer", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def status_of(*arguments: str) -> int:
    """Return the exit status of a command line that this process reads, and that starts nothing."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Both end with status 0; the help names every flag with its default."""
    assert status_of("--version") == 0
    assert capsys.readouterr().out.startswith("kvroute ")
    assert status_of("--help") == 0
    shown = capsys.readouterr().out
    for flag in (
        "--pods-file",
        "--grpc-port",
        "--metrics-port",
        "--block-tokens",
        "--hash-seed",
        "--events-bind",
        "--backend",
        "--tokenizer",
        "--tls-client-ca",
        "--log-level",
    ):
        assert flag in shown
    assert "9010" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--pods-file or --events-bind"),
        (["--events-bind", "ipc://x"], "must begin with tcp://"),
        (["--pods-file", "{good}", "--tier-weight", "cpu=much"], "--tier-weight: cpu=much"),
        (["--pods-file", "{good}", "--tier-weight", "cpu"], "NAME=VALUE"),
        (["--pods-file", "{good}", "--tokenizer", "m=missing"], "--tokenizer"),
        (["--pods-file", "{good}", "--tls-cert", "missing.pem"], "--tls-key"),
        (["--pods-file", "{good}", "--tls-cert", "no.pem", "--tls-key", "no.pem"], "no.pem: cannot be read"),
        (["--pods-file", "missing.yaml"], "missing.yaml: cannot be read"),
        (["--pods-file", "{wrong}"], "wrong.yaml:1: .pods: is unknown"),
        (["--pods-file", "{good}", "--block-tokens", "0"], "block_tokens"),
        (["--pods-file", "{good}", "--grpc-port", "70000"], "--grpc-port"),
    ],
)
def test_wrong_settings_end_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Invalid settings end with status 2; the last line is the reason."""
    good, wrong = tmp_path / "good.yaml", tmp_path / "wrong.yaml"
    good.write_text("endpoints: []")
    wrong.write_text("pods: []")
    assert status_of(*(argument.format(good=good, wrong=wrong) for argument in arguments)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--grpc-port", "--metrics-port"])
def test_a_port_in_use_ends_the_command_with_one_clear_line(tmp_path: Path, flag: str) -> None:
    """A port in use ends the process with status 1; the last line names the flag."""
    (tmp_path / "pods.yaml").write_text("endpoints: []")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"--grpc-port": 0, "--metrics-port": 0, flag: server.getsockname()[1]}
        settings = [str(part) for pair in ports.items() for part in pair]
        ended = run("--pods-file", str(tmp_path / "pods.yaml"), "--host", "127.0.0.1", *settings)
    assert ended.returncode == 1
    assert f"{flag} {ports[flag]}: cannot listen" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_an_address_of_events_in_use_ends_the_command_with_one_clear_line() -> None:
    """An address that cannot be bound ends the process with status 1; the last line is the reason."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = run("--events-bind", f"tcp://127.0.0.1:{server.getsockname()[1]}")
    assert ended.returncode == 1
    assert "cannot listen" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    """The command serves scores and metrics for a pods file; SIGTERM ends it with status 0."""
    with EnginePublisher() as engine:
        engine.publish(block(1), block(2))
        pods = tmp_path / "pods.yaml"
        pods.write_text(
            f"""
            endpoints:
              - name: a
                address: 127.0.0.1
                port: 8000
                labels:
                  kvroute.io/model: {MODEL}
                  kvroute.io/kv-events-port: {engine.events_port}
                  kvroute.io/kv-replay-port: {engine.replay_port}
            """
        )
        flags = ["--host", "127.0.0.1", "--grpc-port", "0", "--metrics-port", "0", "--block-tokens", "4"]
        command = [sys.executable, "-m", "indexer", "--pods-file", str(pods), *flags]
        with started(command, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            ports = next(found for line in lines if (found := re.search(r"grpc (\d+), metrics (\d+)", line)))
            with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
                wait_until("it is scored", lambda: [pod.cached_blocks for pod in score(channel).pods] == [2])
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[2]}/metrics", timeout=DEADLINE_S) as page:
                text = page.read().decode()
            assert "\nkvroute_indexer_blocks 2.0\n" in text
            assert 'kvroute_indexer_stream_state{pod="127.0.0.1:8000",state="STALE"} 0.0' in text
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0


def test_the_command_takes_pods_that_connect_to_it() -> None:
    """Without a pods file pods are identified by their topics and scored for their models."""
    flags = ["--host", "127.0.0.1", "--grpc-port", "0", "--metrics-port", "0", "--block-tokens", "4"]
    command = [sys.executable, "-m", "indexer", "--events-bind", "tcp://127.0.0.1:*", *flags]
    with started(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        grpc_port = next(found[1] for line in lines if (found := re.search(r"grpc (\d+), metrics", line)))
        endpoint = next(found[1] for line in lines if (found := re.search(r"connect to (\S+)", line)))
        with (
            ConnectedEngine(endpoint, POD) as engine,
            grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        ):
            engine.publish(block(1), block(2))

            def cached() -> list[int]:
                return [pod.cached_blocks for pod in score(channel, pods=[POD]).pods]

            wait_until("it is scored", lambda: cached() == [2])
            assert [pod.pod for pod in score(channel).pods] == [POD]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
