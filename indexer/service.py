"""The stand-alone indexer's gRPC service: prompts in, how much of them each pod holds out.

Serves proto/kvroute/v1/indexer.proto, health and reflection; everything it tells comes from a `KvIndexer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.config import PodStream
from indexer.errors import ListenError
from indexer.kv_indexer import KvIndexer, PodMatch
from indexer.stream import StreamState

_STOP_S = 2.0
_SERVICE = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name
_THREADS = 8
_CALLS_AT_ONCE = 64
# Room for a prompt of some million tokens.
_MAX_MESSAGE_BYTES = 16 << 20
_STATES = {
    StreamState.EXACT: pb.STREAM_STATE_EXACT,
    StreamState.RECOVERING: pb.STREAM_STATE_RECOVERING,
    StreamState.STALE: pb.STREAM_STATE_STALE,
}


class IndexerDoor(pb_grpc.IndexerServiceServicer):
    """kvroute.v1.IndexerService.

    Args:
        indexer: Answers.
        streams: What it follows.
    """

    def __init__(self, indexer: KvIndexer, streams: Sequence[PodStream]) -> None:
        self._indexer = indexer
        self._streams = streams

    def Score(  # noqa: N802 (the name is the proto's)
        self, request: pb.ScoreRequest, context: grpc.ServicerContext
    ) -> pb.ScoreResponse:
        """Tells for each pod how much of the prompt it holds."""
        if not request.model:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "model: is missing")
        pods = list(request.pods) or [stream.pod for stream in self._streams if stream.model == request.model]
        if not pods:
            _abort(context, grpc.StatusCode.NOT_FOUND, f"model: no pod serves {request.model!r}")
        keys = self._indexer.block_keys(
            request.model, request.token_ids, lora_name=request.lora_name, cache_salt=request.cache_salt
        )
        matches = self._indexer.match(keys, pods).values()
        ranked = sorted(matches, key=lambda match: (-match.cached_blocks, match.pod))
        return pb.ScoreResponse(
            pods=[self._score(match) for match in ranked],
            block_tokens=self._indexer.block_tokens,
            prompt_blocks=len(keys),
        )

    def Stats(  # noqa: N802 (the name is the proto's)
        self, _request: pb.StatsRequest, _context: grpc.ServicerContext
    ) -> pb.StatsResponse:
        """Tells the size of the index and the state of every event stream."""
        stats = self._indexer.stats()
        states = self._indexer.states()
        return pb.StatsResponse(
            blocks=stats.blocks,
            capacity_blocks=stats.capacity_blocks,
            holdings=stats.holdings,
            evicted_blocks=stats.evicted_blocks,
            pods=[
                pb.PodStream(
                    pod=stream.pod,
                    model=stream.model,
                    state=_state(states.get(stream.pod, StreamState.RECOVERING)),
                )
                for stream in self._streams
            ],
        )

    def _score(self, match: PodMatch) -> pb.PodScore:
        return pb.PodScore(
            pod=match.pod,
            cached_blocks=match.cached_blocks,
            cached_tokens=match.cached_blocks * self._indexer.block_tokens,
            blocks_by_tier=match.blocks_by_tier,
            weighted_blocks=match.weighted_blocks,
            state=_state(match.state),
        )


class IndexerServer:
    """The gRPC server: bound when made, serving from `start` on.

    Raises:
        ListenError: The port is in use, or not ours.
    """

    def __init__(self, door: IndexerDoor, host: str, port: int) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc"),
            options=[
                # Two indexers on one port would share its requests without a word.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ],
            maximum_concurrent_rpcs=_CALLS_AT_ONCE,
        )
        # The generated function has no types.
        add_door: Any = pb_grpc.add_IndexerServiceServicer_to_server
        add_door(door, self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(f"--grpc-port {port}: cannot listen on {address}") from error

    def start(self) -> None:
        """Begins to serve and tells so."""
        self._server.start()
        for service in ("", _SERVICE):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def close(self, grace_s: float) -> None:
        """Tells that it does not serve any more, and ends after at most `grace_s`."""
        self._health.enter_graceful_shutdown()
        # gRPC never ends a call whose message it could not read, and would wait for it for ever.
        self._server.stop(grace_s).wait(grace_s + _STOP_S)


def _state(state: StreamState) -> pb.StreamState:
    return _STATES[state]


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort raises")
