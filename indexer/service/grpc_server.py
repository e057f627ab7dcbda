"""gRPC server of the stand-alone indexer: proto/kvroute/v1/indexer.proto, answered from a `KvIndexer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.tls import FileReloader
from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.config import PodStream
from indexer.errors import ConfigError, ListenError, TokenError
from indexer.index.contract import PodMatch, Prefix, StreamState
from indexer.keys import Keys
from indexer.kv_indexer import KvIndexer
from indexer.peers.service import PEER_SERVICE
from tokenization import PromptError, PromptTokenizer

_SERVICE = pb.DESCRIPTOR.services_by_name["IndexerService"].full_name
_PROMPTS_MAX = 1024
_STOP_S = 2.0
_THREADS = 8
_CALLS_AT_ONCE = 64
# Large enough for a prompt of some million tokens.
_MAX_MESSAGE_BYTES = 16 << 20


@dataclass(eq=False)
class IndexerServer(pb_grpc.IndexerServiceServicer):
    """Server of kvroute.v1.IndexerService and IndexPeer; binds its port in the constructor.

    The health of the service by its name is SERVING once the views are built.

    Raises:
        ListenError: The port is in use or not permitted.
    """

    indexer: KvIndexer
    streams: Sequence[PodStream]  # declared pods, which may be requested before they are followed
    host: InitVar[str]
    port: int  # 0: any free port, which is set here
    credentials: InitVar[grpc.ServerCredentials | None] = None
    tokenizers: Mapping[str, PromptTokenizer] = field(default_factory=dict)  # by model; for prompts as text

    def __post_init__(self, host: str, credentials: grpc.ServerCredentials | None) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc"),
            options=[
                # With SO_REUSEPORT a second indexer on the port would silently take part of the requests.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ],
            maximum_concurrent_rpcs=_CALLS_AT_ONCE,
        )
        pb_grpc.add_IndexerServiceServicer_to_server(self, self._server)
        self.indexer.exports.add_to(self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (_SERVICE, PEER_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ListenError(f"--grpc-port {self.port}: cannot listen on {address}") from error

    def start(self) -> None:
        self._server.start()
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._health.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)

    def set_ready(self) -> None:
        """Report SERVING: the views are built, or `bootstrap_s` is over."""
        self._health.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)

    def close(self, grace_s: float) -> None:
        self._health.enter_graceful_shutdown()
        # gRPC never ends a call whose message it could not decode, and would wait for it forever.
        self._server.stop(grace_s).wait(grace_s + _STOP_S)

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:
        keys, pods, tokens = self._prompt(request, context)
        matches = self.indexer.match(keys, pods, prompt_tokens=len(tokens), tokens=tokens).values()
        ranked = sorted(matches, key=lambda match: (-match.cached_blocks, match.pod))
        return pb.ScoreResponse(
            pods=[self._score(match) for match in ranked],
            block_tokens=self.indexer.block_tokens,
            prompt_blocks=len(keys),
        )

    def ScoreBatch(
        self, request: pb.ScoreBatchRequest, context: grpc.ServicerContext
    ) -> pb.ScoreBatchResponse:
        if len(request.prompts) > _PROMPTS_MAX:
            _abort(context, f"prompts: expected at most {_PROMPTS_MAX}, got {len(request.prompts)}")
        return pb.ScoreBatchResponse(responses=[self.Score(prompt, context) for prompt in request.prompts])

    def Explain(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ExplainPrefixResponse:
        keys, pods, tokens = self._prompt(request, context)
        prefixes = self.indexer.explain(keys, pods, prompt_tokens=len(tokens), tokens=tokens)
        return pb.ExplainPrefixResponse(
            engines=[_explanation(prefix) for prefix in prefixes],
            block_tokens=self.indexer.block_tokens,
            prompt_blocks=len(keys),
        )

    def Stats(self, _request: pb.StatsRequest, _context: grpc.ServicerContext) -> pb.StatsResponse:
        return pb.StatsResponse(
            **asdict(self.indexer.stats()),
            block_tokens=self.indexer.block_tokens,
            pending=sorted(self.indexer.pending()),
            pods=[
                pb.PodStream(
                    pod=engine.stream.pod,
                    model=engine.stream.model,
                    state=_state(engine.state),
                    reason=engine.reason,
                    rank=engine.stream.rank,
                    linked=engine.linked,
                )
                for engine in self.indexer.engine_registry.engines.values()
            ],
        )

    def Clear(self, request: pb.ClearRequest, context: grpc.ServicerContext) -> pb.ClearResponse:
        followed = {engine.stream.pod for engine in self.indexer.engine_registry.engines.values()}
        pods = list(dict.fromkeys(request.pods)) or sorted(followed)
        for pod in pods:
            if pod not in followed:
                _abort(context, f"pods: {pod!r} is not followed", grpc.StatusCode.NOT_FOUND)
        for pod in pods:
            self.indexer.invalidate(pod, "cleared_by_hand")
        return pb.ClearResponse(pods=len(pods))

    def _prompt(
        self, request: pb.ScoreRequest, context: grpc.ServicerContext
    ) -> tuple[Keys, Sequence[str], Sequence[int]]:
        """Return the prompt's block keys, the requested pods, and the prompt's token ids."""
        if not request.model:
            _abort(context, "model: missing")
        if request.text and request.token_ids:
            _abort(context, "text, token_ids: give only one of them")
        pods = list(dict.fromkeys(request.pods)) or self._serving(request.model)
        if not pods:
            _abort(context, f"model: no pod serves {request.model!r}", grpc.StatusCode.NOT_FOUND)
        token_ids = self._encoded(request, context) if request.text else request.token_ids
        try:
            keys = self.indexer.block_keys(
                request.model, token_ids, lora_name=request.lora_name, cache_salt=request.cache_salt
            )
        except TokenError as error:
            _abort(context, f"token_ids: {error}")
        return keys, pods, token_ids

    def _serving(self, model: str) -> list[str]:
        """Return the pods of a model: declared ones, then undeclared ones that connected."""
        engines = self.indexer.engine_registry.engines.values()
        streams = [*self.streams, *(engine.stream for engine in engines)]
        return list(dict.fromkeys(stream.pod for stream in streams if stream.model == model))

    def _encoded(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> Sequence[int]:
        tokenizer = self.tokenizers.get(request.model)
        if tokenizer is None:
            _abort(
                context,
                f"text: no tokenizer for {request.model!r}; start the indexer with --tokenizer MODEL=DIR",
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        try:
            return tokenizer.encode(request.text)
        except PromptError as error:
            _abort(context, f"text: {error}")

    def _score(self, match: PodMatch) -> pb.PodScore:
        return pb.PodScore(
            pod=match.pod,
            cached_blocks=match.cached_blocks,
            cached_tokens=match.cached_blocks * self.indexer.block_tokens,
            blocks_by_tier=match.blocks_by_tier,
            weighted_blocks=match.weighted_blocks,
            state=_state(match.state),
        )


def _explanation(prefix: Prefix) -> pb.EngineExplanation:
    held = prefix.held
    fields = asdict(prefix) | held._asdict()
    fields |= {
        "state": _state(prefix.state),
        "end": f"PREFIX_END_{held.end.name}",
        "tiers": [pb.TierRun(tier=tier, blocks=blocks) for tier, blocks in held.tiers],
    }
    del fields["held"]
    return pb.EngineExplanation(evicted_seconds_ago=fields.pop("evicted_s_ago"), **fields)


def _state(state: StreamState) -> str:
    return f"STREAM_STATE_{state.name}"


def _abort(
    context: grpc.ServicerContext, details: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort raises")


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Return credentials from PEM files, reloaded on change; `client_ca` requires client certificates.

    Raises:
        ConfigError: A file cannot be read.
    """

    def load() -> grpc.ServerCertificateConfiguration:
        chain, ca = cert.read_bytes(), None if client_ca is None else client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), chain)], ca)

    try:
        files = [path for path in (cert, key, client_ca) if path is not None]
        followed = FileReloader("grpc", files, load)
    except OSError as error:
        raise ConfigError(f"TLS: {error.filename}: cannot be read: {error.strerror}") from error
    used = [followed.current()]

    def changed() -> grpc.ServerCertificateConfiguration | None:
        before, used[:] = used[0], [followed.current()]
        return None if used[0] is before else used[0]

    # The type stubs do not allow None, which means unchanged.
    fetcher: Any = changed
    return grpc.dynamic_ssl_server_credentials(
        used[0], fetcher, require_client_authentication=client_ca is not None
    )
