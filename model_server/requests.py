"""Inputs, outputs and counters of the engine: token ids only, no text and no HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from model_server.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

# Below this, dividing by the temperature overflows; it is greedy for all practical purposes.
GREEDY_BELOW = 1e-5
_SALT_CHARACTERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when generation ends."""

    max_tokens: int  # most tokens to generate; at least 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 keeps all
    top_k: int = 0  # keep this many of the most probable tokens; 0 (or less) keeps all
    min_p: float = 0.0  # drop tokens less probable than this share of the most probable one; 0 drops none
    seed: int | None = None  # makes the sampled tokens repeatable, whatever else is in the batch
    # Tokens that end generation besides the model's own end of sequence.
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # do not end at the model's end of sequence (`stop_token_ids` still end it)
    min_tokens: int = 0  # no stop token may be chosen before this many tokens
    frequency_penalty: float = 0.0  # taken from a token's logit for each time it was generated; -2 to 2
    presence_penalty: float = 0.0  # taken from the logit of each token that was generated; -2 to 2
    # Divides positive and multiplies negative logits of the prompt's and the generated tokens; above 0, and 1
    # changes nothing.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of single tokens
    allowed_token_ids: frozenset[int] | None = None  # only these may be chosen; None allows all
    # Tell the log probability of each chosen token and of this many most probable ones; None tells nothing.
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the token with the largest logit is always chosen, and nothing is told about it."""
        return (
            self.temperature < GREEDY_BELOW
            and self.repetition_penalty == 1.0
            and not (self.frequency_penalty or self.presence_penalty or self.logit_bias or self.min_tokens)
            and self.allowed_token_ids is None
            and self.logprobs is None
        )


class TokenConstraint(Protocol):
    """Says which tokens may come next; it follows one generation from its beginning to its end."""

    def allowed_bits(self) -> bytes:
        """Return one bit a token, the first token in the lowest bit; tokens beyond the end may not come."""

    def accept(self, token_id: int) -> None: ...

    @property
    def error(self) -> str | None:
        """Why it had to give up, so that the answer is not what was asked for; None while all is well."""


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One prompt to continue."""

    request_id: str  # unique among the live requests
    prompt_token_ids: tuple[int, ...]  # the prompt; at least one token
    sampling: SamplingParams  # how to continue it
    cache_salt: str | None = None  # prefix blocks are shared only between requests of the same salt
    lora_name: str | None = None  # a loaded adapter; None is the base model
    constraint: TokenConstraint | None = None  # what the answer must be like; used by this request alone
    priority: int = 0  # lower numbers run first where the engine schedules by priority


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LoraRequest:
    """What a request with an adapter keeps of it; the factors are with whoever computes."""

    name: str  # what requests call it
    lora_id: int  # number of this loading, from 1 on; never given twice
    content_hash: str  # hexadecimal SHA-256 of its files: what it computes depends on nothing else
    directory: Path = Path()  # where it was loaded from


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a chosen token was; natural logarithms, before penalties, temperature and bans."""

    chosen: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # the most probable tokens and theirs, best first


class ChosenToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token, with its log probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class EngineCoreOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step brought to one request; the last one carries `finish_reason`."""

    request_id: str  # the request it belongs to
    token_ids: tuple[int, ...]  # new tokens, the stop token included; may be empty on the last output
    finish_reason: FinishReason | None  # none while more will come
    cached_tokens: int  # prompt tokens that were served from the cache instead of computed
    error: str | None = None  # what went wrong when `finish_reason` is "error"
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry per token where they were asked for, else empty
    started_s: float | None = None  # when the request's first step began, by `time.monotonic`; None before


def check_request(request: EngineCoreRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what could never run by a RequestError that names the field."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    if len(prompt) + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; prompt and answer together must fit into the "
            f"{max_model_len} tokens of the model's context, so use at most {max_model_len - 1}",
            "prompt",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(f"the prompt holds a token id outside 0..{vocab_size - 1}", "prompt")
    _check_salt(request.cache_salt)
    _check_sampling(request.sampling, vocab_size)


def _check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not 1 <= len(salt) <= _SALT_CHARACTERS_MAX:
        raise RequestError(f"cache_salt must have 1 to {_SALT_CHARACTERS_MAX} characters", "cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise RequestError("cache_salt holds half of a surrogate pair", "cache_salt") from None


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    rules = {
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "temperature": (0.0 <= sampling.temperature < float("inf"), "a number of at least 0"),
        "top_p": (0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
        "min_p": (0.0 <= sampling.min_p <= 1.0, "between 0 and 1"),
        "min_tokens": (0 <= sampling.min_tokens <= sampling.max_tokens, "between 0 and max_tokens"),
        "frequency_penalty": (-2.0 <= sampling.frequency_penalty <= 2.0, "between -2 and 2"),
        "presence_penalty": (-2.0 <= sampling.presence_penalty <= 2.0, "between -2 and 2"),
        "repetition_penalty": (0.0 < sampling.repetition_penalty < float("inf"), "a number above 0"),
        "logprobs": (0 <= (sampling.logprobs or 0) <= vocab_size, f"between 0 and {vocab_size}"),
        "logit_bias": (
            all(0 <= token < vocab_size for token in sampling.logit_bias),
            f"given for token ids within 0..{vocab_size - 1}",
        ),
        "allowed_token_ids": (
            sampling.allowed_token_ids is None
            or (
                len(sampling.allowed_token_ids) > 0
                and all(0 <= token < vocab_size for token in sampling.allowed_token_ids)
            ),
            f"at least one token id, all within 0..{vocab_size - 1}",
        ),
        "stop_token_ids": (
            all(0 <= token < vocab_size for token in sampling.stop_token_ids),
            f"token ids within 0..{vocab_size - 1}",
        ),
    }
    for param, (holds, wanted) in rules.items():
        if not holds:
            raise RequestError(f"{param} is {getattr(sampling, param)}; it must be {wanted}", param)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters are totals since its start."""

    running: int  # requests that hold KV blocks now
    waiting: int  # requests that wait to run now
    kv_usage: float  # share of the pool's blocks that requests hold now, 0 to 1
    total_blocks: int  # in the pool
    prefix_queries_tokens: int  # prompt tokens looked up in the cache
    prefix_hits_tokens: int  # those found there
    preemptions: int  # times that a running request was pushed back to waiting
    prompt_tokens: int  # of the requests that began to run
    generated_tokens: int
    steps: int  # that ran the model
    last_step_monotonic_s: float  # `time.monotonic()` when the loop last turned; an idle loop turns too
    healthy: bool  # False once the loop has died
    host_hits_tokens: int = 0  # those of `prefix_hits_tokens` that had to be restored from the host tier
    host_blocks: int = 0  # in the host tier
    host_usage: float = 0.0  # share of them that hold something, 0 to 1
    swapped_in_blocks: int = 0  # restored from the host tier
    swapped_out_blocks: int = 0  # stored in the host tier
    block_bytes: int = 0  # of one block, for bytes moved and held
    restores: int = 0  # times that a request waited for a restore
    prefill_tokens_per_s: float = 0.0  # measured speed of prefills; 0 before the first
    asleep: bool = False

    @property
    def device_hits_tokens(self) -> int:
        return self.prefix_hits_tokens - self.host_hits_tokens

    @property
    def host_queries_tokens(self) -> int:
        """Prompt tokens looked up in the host tier: what the device does not have."""
        return self.prefix_queries_tokens - self.device_hits_tokens if self.host_blocks else 0

    @property
    def swapped_in_bytes(self) -> int:
        return self.swapped_in_blocks * self.block_bytes

    @property
    def swapped_out_bytes(self) -> int:
        return self.swapped_out_blocks * self.block_bytes
