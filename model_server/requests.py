"""Inputs, outputs and counters of the engine: token ids only, no text and no HTTP."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from model_server.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

# Lower temperatures are greedy: dividing by them overflows.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling and of the end of generation."""

    max_tokens: int  # maximum tokens to generate; at least 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the most probable tokens up to this total probability; 1 keeps all
    top_k: int = 0  # keep this many most probable tokens; 0 or less keeps all
    min_p: float = 0.0  # drop tokens below this fraction of the largest probability; 0 drops none
    seed: int | None = None  # makes sampling reproducible, independent of the batch
    # Tokens that end generation besides the end-of-sequence tokens.
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # do not stop at end-of-sequence tokens (`stop_token_ids` still apply)
    min_tokens: int = 0  # stop tokens are banned before this many tokens
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output; -2 to 2
    presence_penalty: float = 0.0  # subtracted once per generated token id; -2 to 2
    # Divides positive and multiplies negative logits of prompt and output tokens; above 0; 1 disables it.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these token ids
    allowed_token_ids: frozenset[int] | None = None  # only these may be sampled; None allows all
    # Return the log probability of each sampled token and of this many most probable ones; None: neither.
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def is_greedy(self) -> bool:
        """True if argmax suffices: temperature 0, no change of logits, no log probabilities."""
        return (
            self.temperature < GREEDY_BELOW
            and not (self.has_penalties or self.logit_bias or self.min_tokens)
            and self.allowed_token_ids is None
            and self.logprobs is None
        )


class TokenConstraint(Protocol):
    """Grammar state of one generation, for structured output; a part of llguidance's `LLMatcher`."""

    def compute_bitmask(self) -> bytes:
        """Return the allowed tokens as a bit mask, lowest bit first; tokens beyond its end are banned.

        After an error only end-of-sequence tokens are allowed.
        """

    def consume_token(self, sampled_token: int, /) -> bool: ...

    def get_error(self) -> str:
        """Return why the grammar was abandoned, for example as too complex; empty if it holds."""


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """Request for the engine: one prompt to continue."""

    request_id: str  # unique among live requests
    prompt_token_ids: tuple[int, ...]  # at least one token
    sampling: SamplingParams
    cache_salt: str | None = None  # cached blocks are shared only between requests with equal salts
    lora_name: str | None = None  # loaded LoRA adapter; None for the base model
    constraint: TokenConstraint | None = None  # not shared with other requests
    priority: int = 0  # with the "priority" policy, lower runs first


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LoraRequest:
    """Identity of a loaded LoRA adapter. The ranks that compute have its weights."""

    name: str  # model name in requests
    lora_id: int  # from 1; unique per load, never reused
    content_hash: str  # hexadecimal SHA-256 of its files, which determines its KV
    directory: Path = Path()  # source of the files


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of one position, before penalties, temperature and bans."""

    chosen: float  # of the sampled token
    top: tuple[tuple[int, float], ...]  # most probable tokens with theirs, best first


class ChosenToken(msgspec.Struct, frozen=True, gc=False):
    """Sampled token, with its log probabilities if requested."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class EngineCoreOutput(msgspec.Struct, frozen=True, gc=False):
    """Output of one step for one request; the last one has a `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]  # new tokens with the stop token; may be empty in the last output
    finish_reason: FinishReason | None  # None if more outputs follow
    cached_tokens: int  # prompt tokens found in the cache
    error: str | None = None  # set if `finish_reason` is "error"
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if requested, else empty
    started_s: float | None = None  # start of the request's first step (`time.monotonic`)


def check_request(request: EngineCoreRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raise a RequestError, naming the field, for a request that this model can never run.

    The API has checked types and ranges that are the same for all models.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if len(prompt) + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together must fit into the "
            f"{max_model_len} tokens of the model's context, so use at most {max_model_len - 1}",
            "prompt",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(f"the prompt contains a token id outside 0..{vocab_size - 1}", "prompt")
    sampling = request.sampling
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty; give at least one token id", "allowed_token_ids")
    for param in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        token_ids: Iterable[int] = getattr(sampling, param) or ()
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise RequestError(f"{param} contains a token id outside 0..{vocab_size - 1}", param)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Engine statistics at one moment; counters are totals since start."""

    running: int  # requests with KV blocks
    waiting: int  # requests waiting to run
    kv_usage: float  # fraction of the pool's blocks in use, 0 to 1
    total_blocks: int  # blocks of the pool
    prefix_queries_tokens: int  # prompt tokens looked up in the prefix cache
    prefix_hits_tokens: int  # prompt tokens found, in either tier
    preemptions: int  # times a running request returned to waiting
    prompt_tokens: int  # of admitted requests
    generated_tokens: int
    steps: int  # model steps run
    last_step_monotonic_s: float  # last turn of the loop, idle or not (`time.monotonic`)
    healthy: bool  # False once the engine loop has died
    host_hits_tokens: int = 0  # part of `prefix_hits_tokens` restored from the host tier
    host_blocks: int = 0  # slots of the host tier
    host_usage: float = 0.0  # fraction of the slots in use, 0 to 1
    swapped_in_blocks: int = 0  # restored from the host tier
    swapped_out_blocks: int = 0  # stored in the host tier
    block_bytes: int = 0  # bytes of one block
    restores: int = 0  # times a request waited for a restore
    prefill_tokens_per_s: float = 0.0  # measured; 0 before the first sample
    asleep: bool = False

    @property
    def device_hits_tokens(self) -> int:
        return self.prefix_hits_tokens - self.host_hits_tokens

    @property
    def host_queries_tokens(self) -> int:
        """Prompt tokens looked up in the host tier: those not found on the device."""
        return self.prefix_queries_tokens - self.device_hits_tokens if self.host_blocks else 0

    @property
    def swapped_in_bytes(self) -> int:
        return self.swapped_in_blocks * self.block_bytes

    @property
    def swapped_out_bytes(self) -> int:
        return self.swapped_out_blocks * self.block_bytes
