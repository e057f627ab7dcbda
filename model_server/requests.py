"""What goes into the engine and what comes out: token ids in, token ids out.

Nothing here knows text, HTTP or the KV cache.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


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


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        request_id: Unique among the live requests.
        prompt_token_ids: The prompt; at least one token.
        sampling: How to continue it.
        cache_salt: Prefix blocks are shared only between requests of the same salt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step brought to one request; the last one carries `finish_reason`.

    Attributes:
        request_id: The request it belongs to.
        token_ids: New tokens, the stop token included; may be empty on the last output.
        finish_reason: None while more will come.
        cached_tokens: Prompt tokens that were served from the cache instead of computed.
        error: What went wrong when `finish_reason` is "error".
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    cached_tokens: int
    error: str | None = None
