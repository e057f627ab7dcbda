"""The stand-alone indexer's gRPC service: prompts in, how much of them each pod holds out.

Answers proto/kvroute/v1/indexer.proto; everything it tells comes from a `KvIndexer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import grpc

from indexer._pb import indexer_pb2 as pb
from indexer._pb import indexer_pb2_grpc as pb_grpc
from indexer.config import PodStream
from indexer.errors import TokenError
from indexer.index import PodMatch, Prefix, PrefixEnd
from indexer.keys import Keys
from indexer.kv_indexer import KvIndexer
from indexer.stream import StreamState
from tokenization import PromptError, PromptTokenizer

_PROMPTS_MAX = 1024
_STATES = {
    StreamState.EXACT: pb.STREAM_STATE_EXACT,
    StreamState.RECOVERING: pb.STREAM_STATE_RECOVERING,
    StreamState.STALE: pb.STREAM_STATE_STALE,
}


_ENDS = {
    PrefixEnd.PROMPT: pb.PREFIX_END_PROMPT,
    PrefixEnd.HOLE: pb.PREFIX_END_HOLE,
    PrefixEnd.OTHER_ATTENTION: pb.PREFIX_END_OTHER_ATTENTION,
}


class IndexerDoor(pb_grpc.IndexerServiceServicer):
    """kvroute.v1.IndexerService.

    Args:
        tokenizers: By model; for prompts that come as text.
    """

    def __init__(
        self,
        indexer: KvIndexer,
        streams: Sequence[PodStream],
        tokenizers: Mapping[str, PromptTokenizer] | None = None,
    ) -> None:
        self._indexer = indexer
        self._streams = streams
        self._tokenizers = tokenizers or {}

    def Score(  # noqa: N802 (the name is the proto's)
        self, request: pb.ScoreRequest, context: grpc.ServicerContext
    ) -> pb.ScoreResponse:
        keys, pods, prompt_tokens = self._prompt(request, context)
        matches = self._indexer.match(keys, pods, prompt_tokens=prompt_tokens).values()
        ranked = sorted(matches, key=lambda match: (-match.cached_blocks, match.pod))
        return pb.ScoreResponse(
            pods=[self._score(match) for match in ranked],
            block_tokens=self._indexer.block_tokens,
            prompt_blocks=len(keys),
        )

    def ScoreBatch(  # noqa: N802 (the name is the proto's)
        self, request: pb.ScoreBatchRequest, context: grpc.ServicerContext
    ) -> pb.ScoreBatchResponse:
        if len(request.prompts) > _PROMPTS_MAX:
            _abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"prompts: are {len(request.prompts)}, at most {_PROMPTS_MAX}",
            )
        return pb.ScoreBatchResponse(responses=[self.Score(prompt, context) for prompt in request.prompts])

    def Explain(  # noqa: N802 (the name is the proto's)
        self, request: pb.ScoreRequest, context: grpc.ServicerContext
    ) -> pb.ExplainPrefixResponse:
        """Tells for each engine where the prefix that it holds ends, and why."""
        keys, pods, prompt_tokens = self._prompt(request, context)
        prefixes = self._indexer.explain(keys, pods, prompt_tokens=prompt_tokens)
        return pb.ExplainPrefixResponse(
            engines=[_explanation(prefix) for prefix in prefixes],
            block_tokens=self._indexer.block_tokens,
            prompt_blocks=len(keys),
        )

    def Stats(  # noqa: N802 (the name is the proto's)
        self, _request: pb.StatsRequest, _context: grpc.ServicerContext
    ) -> pb.StatsResponse:
        stats = self._indexer.stats()
        return pb.StatsResponse(
            blocks=stats.blocks,
            capacity_blocks=stats.capacity_blocks,
            holdings=stats.holdings,
            evicted_blocks=stats.evicted_blocks,
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            block_tokens=self._indexer.block_tokens,
            pending=sorted(self._indexer.pending()),
            pods=[
                pb.PodStream(
                    pod=engine.stream.pod,
                    model=engine.stream.model,
                    state=_state(engine.state),
                    reason=engine.reason,
                    rank=engine.stream.rank,
                    linked=engine.linked,
                )
                for engine in self._indexer.roster.engines.values()
            ],
        )

    def Clear(  # noqa: N802 (the name is the proto's)
        self, request: pb.ClearRequest, context: grpc.ServicerContext
    ) -> pb.ClearResponse:
        """Drops the views of pods, to be built anew."""
        followed = {engine.stream.pod for engine in self._indexer.roster.engines.values()}
        pods = list(dict.fromkeys(request.pods)) or sorted(followed)
        for pod in pods:
            if pod not in followed:
                _abort(context, grpc.StatusCode.NOT_FOUND, f"pods: {pod!r} is not followed")
        for pod in pods:
            self._indexer.doubt(pod, "cleared_by_hand")
        return pb.ClearResponse(pods=len(pods))

    def _prompt(
        self, request: pb.ScoreRequest, context: grpc.ServicerContext
    ) -> tuple[Keys, Sequence[str], int]:
        """Keys of the prompt, the pods that are asked for, and the prompt's length in tokens."""
        if not request.model:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "model: is missing")
        if request.text and request.token_ids:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "text: is there beside token_ids")
        pods = list(dict.fromkeys(request.pods)) or self._serving(request.model)
        if not pods:
            _abort(context, grpc.StatusCode.NOT_FOUND, f"model: no pod serves {request.model!r}")
        token_ids = self._encoded(request, context) if request.text else request.token_ids
        try:
            keys = self._indexer.block_keys(
                request.model, token_ids, lora_name=request.lora_name, cache_salt=request.cache_salt
            )
        except TokenError as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"token_ids: {error}")
        return keys, pods, len(token_ids)

    def _serving(self, model: str) -> list[str]:
        """Pods of a model: those that were declared, then those that came by themselves."""
        engines = self._indexer.roster.engines.values()
        streams = [*self._streams, *(engine.stream for engine in engines)]
        return list(dict.fromkeys(stream.pod for stream in streams if stream.model == model))

    def _encoded(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> Sequence[int]:
        tokenizer = self._tokenizers.get(request.model)
        if tokenizer is None:
            _abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"text: there is no tokenizer for {request.model!r}; start with --tokenizer MODEL=DIR",
            )
        try:
            return tokenizer.encode(request.text)
        except PromptError as error:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"text: {error}")

    def _score(self, match: PodMatch) -> pb.PodScore:
        return pb.PodScore(
            pod=match.pod,
            cached_blocks=match.cached_blocks,
            cached_tokens=match.cached_blocks * self._indexer.block_tokens,
            blocks_by_tier=match.blocks_by_tier,
            weighted_blocks=match.weighted_blocks,
            state=_state(match.state),
        )


def _explanation(prefix: Prefix) -> pb.EngineExplanation:
    return pb.EngineExplanation(
        engine=prefix.engine,
        state=_state(prefix.state),
        reason=prefix.reason,
        cached_blocks=prefix.cached_blocks,
        end=_ENDS[prefix.end],
        held_blocks=prefix.held_blocks,
        held_beyond=prefix.held_beyond,
        tiers=[pb.TierRun(tier=tier, blocks=blocks) for tier, blocks in prefix.tiers],
    )


def _state(state: StreamState) -> pb.StreamState:
    return _STATES[state]


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort raises")
