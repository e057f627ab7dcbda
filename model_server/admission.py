"""The check that every request passes before the engine takes it.

In: a request and the engine's limits. Out: nothing, or a RequestError that names the field at fault.
"""

from model_server.errors import RequestError
from model_server.requests import GenerationRequest, SamplingParams

_SALT_CHARACTERS_MAX = 1024


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what could never run.

    Args:
        request: As it came in.
        vocab_size: Token ids must be below this.
        max_model_len: Most tokens of prompt and answer together.

    Raises:
        RequestError: Something in the request is out of range.
    """
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
