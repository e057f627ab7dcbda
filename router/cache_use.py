"""Which requests an engine serves without its prefix cache, and of which its usage tells only a part.

Requests come in, answers to these two questions come out. Pure; knows no pods, tokens or prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.request import RequestKind, RouteRequest

_WITH_LOGPROBS = (RequestKind.CHAT, RequestKind.COMPLETIONS)

CACHE_NOT_READ = "cache_not_read"
"""Why a request is picked by load alone whose whole prompt every pod will compute."""


def reads_cache(request: RouteRequest) -> bool:
    """Whether an engine looks the prompt up in its cache.

    Log probabilities of a prompt's tokens are computed with the prompt. vLLM then reads no cache at all, and
    SGLang only up to the first token that is asked for: predicted is nothing for either.
    """
    if request.kind not in _WITH_LOGPROBS:
        return True
    body, sampling = request.body, _sampling(request.body)
    if isinstance(skips := sampling.get("skip_reading_prefix_cache"), bool):
        return not skips
    names = ((body, "prompt_logprobs"), (sampling, "prompt_logprobs"), (sampling, "prompt_logprob_token_ids"))
    if any(fields.get(name) is not None for fields, name in names) or _starts_in_prompt(body):
        return False
    if not body.get("echo"):
        return True
    # A chat that does not say how many alternatives it wants wants 0: the tokens' own log probabilities.
    if request.kind is RequestKind.CHAT:
        return body.get("top_logprobs", 0) is None
    return body.get("logprobs") is None


def usage_tells_all(request: RouteRequest, prompts: int) -> bool:
    """Whether `cached_tokens` of the answer's usage counts all that is predicted, and nothing else.

    Of several samples vLLM tells one's, which may have found what another has just computed; of several
    prompts it tells one's.
    """
    body = request.body
    samples = [fields.get("n") for fields in (body, _sampling(body))]
    return prompts == 1 and all(n is None or n == 1 for n in samples)


def _sampling(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of vLLM's /inference/v1/generate and SGLang's /generate."""
    sampling = body.get("sampling_params")
    return sampling if isinstance(sampling, dict) else {}


def _starts_in_prompt(body: Mapping[str, Any]) -> bool:
    """SGLang's own words for log probabilities of the prompt."""
    start = body.get("logprob_start_len")
    return bool(body.get("return_logprob")) and isinstance(start, int) and start >= 0
