"""Log probabilities as the OpenAI API shows them: one form for completions, one for chats.

In: chosen tokens with their log probabilities. Out: dicts ready for JSON. Knows one tokenizer.
"""

from collections.abc import Sequence
from typing import Any

from model_server.requests import ChosenToken
from tokenization import PromptTokenizer

Json = dict[str, Any]

# What stands for the logarithm of 0, which JSON has no number for; vLLM's choice.
_LEAST = -9999.0
_NOT_UTF8 = "\ufffd"


def completion_logprobs(tokens: Sequence[ChosenToken], tokenizer: PromptTokenizer, offset: int) -> Json:
    """The `logprobs` of a completion's choice.

    Args:
        tokens: Its tokens.
        tokenizer: Spells them.
        offset: Characters that came before them.
    """
    texts = [_text(tokenizer, token.token_id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    best = []
    for token, text in zip(tokens, texts, strict=True):
        assert token.logprobs is not None
        named = {_text(tokenizer, other): _shown(logprob) for other, logprob in token.logprobs.top}
        best.append({text: _shown(token.logprobs.chosen), **named})
    own = [_shown(token.logprobs.chosen) for token in tokens if token.logprobs is not None]
    return {"text_offset": offsets, "token_logprobs": own, "tokens": texts, "top_logprobs": best}


def chat_logprobs(tokens: Sequence[ChosenToken], tokenizer: PromptTokenizer) -> Json:
    """The `logprobs` of a chat's choice."""
    content = []
    for token in tokens:
        assert token.logprobs is not None
        top = [_entry(tokenizer, other, logprob) for other, logprob in token.logprobs.top]
        content.append({**_entry(tokenizer, token.token_id, token.logprobs.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(tokenizer: PromptTokenizer, token_id: int, logprob: float) -> Json:
    text = _text(tokenizer, token_id)
    # A token that is only a part of a character has no text of its own to take bytes from.
    own_bytes = None if _NOT_UTF8 in text else list(text.encode())
    return {"token": text, "logprob": _shown(logprob), "bytes": own_bytes}


def _text(tokenizer: PromptTokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _shown(logprob: float) -> float:
    # Written so that NaN, of a model whose logits overflowed, becomes a number too.
    return logprob if logprob > _LEAST else _LEAST
