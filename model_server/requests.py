"""What goes into the engine and what comes out: token ids in, token ids out.

Nothing here knows text, HTTP or the KV cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]

# Below this, dividing by the temperature overflows; it is greedy for all practical purposes.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    Attributes:
        max_tokens: Most tokens to generate; at least 1.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens with at least this probability; 1 keeps all.
        top_k: Keep this many of the most probable tokens; 0 (or less) keeps all.
        min_p: Drop tokens less probable than this share of the most probable one; 0 drops none.
        seed: Makes the sampled tokens repeatable, whatever else is in the batch.
        stop_token_ids: Tokens that end generation besides the model's own end of sequence.
        ignore_eos: Do not end at the model's end of sequence (`stop_token_ids` still end it).
        min_tokens: No stop token may be chosen before this many tokens.
        frequency_penalty: Taken from a token's logit for each time it was generated; -2 to 2.
        presence_penalty: Taken from the logit of each token that was generated; -2 to 2.
        repetition_penalty: Divides positive and multiplies negative logits of the prompt's and the generated
            tokens; above 0, and 1 changes nothing.
        logit_bias: What is added to the logits of single tokens.
        allowed_token_ids: Only these may be chosen; None allows all.
        logprobs: Tell the log probability of each chosen token and of this many most probable ones; None
            tells nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] | None = None
    logprobs: int | None = None

    @property
    def takes_best(self) -> bool:
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

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""

    @property
    def error(self) -> str | None:
        """Why it had to give up, so that the answer is not what was asked for; None while all is well."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        request_id: Unique among the live requests.
        prompt_token_ids: The prompt; at least one token.
        sampling: How to continue it.
        cache_salt: Prefix blocks are shared only between requests of the same salt.
        lora_name: A loaded adapter; None is the base model.
        constraint: What the answer must be like; used by this request alone. None leaves it free.
        priority: Lower numbers run first where the engine schedules by priority.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str | None = None
    lora_name: str | None = None
    constraint: TokenConstraint | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a chosen token was; natural logarithms, before penalties, temperature and bans."""

    chosen: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # the most probable tokens and theirs, best first


class ChosenToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token, with its log probabilities where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step brought to one request; the last one carries `finish_reason`.

    Attributes:
        request_id: The request it belongs to.
        token_ids: New tokens, the stop token included; may be empty on the last output.
        finish_reason: None while more will come.
        cached_tokens: Prompt tokens that were served from the cache instead of computed.
        error: What went wrong when `finish_reason` is "error".
        logprobs: One entry per token where they were asked for, else empty.
        started_s: When the request's first step began, by `time.monotonic`; None before.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    cached_tokens: int
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    started_s: float | None = None
