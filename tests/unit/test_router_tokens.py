"""Requests to token ids: the engine's own, or a counted reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError, RequestError
from router.request import RequestKind, RouteRequest
from router.tokens import TokenizerRegistry
from tests.unit.router_support import TINY, TOKENIZER, completion
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.openai_prompts import chat_prompt


class BrokenTokenizer(PromptTokenizer):
    """Trips over everything."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Fails."""
        raise RuntimeError("broken")


REGISTRY = TokenizerRegistry({TINY: TOKENIZER, "broken": BrokenTokenizer.from_directory(TINY_DIRECTORY)})
MESSAGES = [{"role": "user", "content": "Hello there"}]


def chat(messages: object, **fields: object) -> RouteRequest:
    """A chat request."""
    body = {"model": TINY, "messages": messages, **fields}
    return RouteRequest("id", RequestKind.CHAT, TINY, body, body_bytes=400)


def test_a_chat_becomes_the_engines_token_ids() -> None:
    """Chat messages give exactly what the shared tokenization gives the model server."""
    tokens = REGISTRY.prompt_tokens(chat(MESSAGES), TINY)
    assert tokens.prompts == (chat_prompt({"messages": MESSAGES}, TOKENIZER),)
    assert (tokens.total, tokens.degraded) == (len(tokens.prompts[0]), None)


def test_several_prompts_are_several_token_lists() -> None:
    """A completions request with two prompts counts the tokens of both."""
    tokens = REGISTRY.prompt_tokens(completion("id", ["one", "two words"]), TINY)
    assert tokens.prompts == (TOKENIZER.encode("one"), TOKENIZER.encode("two words"))
    assert tokens.total == sum(map(len, tokens.prompts))


def test_a_prompt_of_token_ids_needs_no_tokenizer() -> None:
    """Ids are taken as they are, even for a model whose tokenizer is not known."""
    tokens = REGISTRY.prompt_tokens(completion("id", [1, 2, 3]), "unknown")
    assert (tokens.prompts, tokens.degraded) == (([1, 2, 3],), None)


@pytest.mark.parametrize(
    ("request_", "base", "reason"),
    [
        (chat(MESSAGES), "other", "no_tokenizer"),
        (chat(MESSAGES), None, "no_tokenizer"),
        (
            chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            TINY,
            "unsupported_prompt",
        ),
        (chat(MESSAGES), "broken", "tokenize_error"),
        (completion("id", "\ud800"), TINY, "tokenize_error"),
        (RouteRequest("id", RequestKind.PASSTHROUGH, body_bytes=400), TINY, "passthrough"),
    ],
)
def test_what_cannot_be_tokenized_is_routed_by_load_with_a_reason(
    request_: RouteRequest, base: str | None, reason: str
) -> None:
    """A missing tokenizer or a failure costs the prefix, names its reason and leaves an estimate."""
    tokens = REGISTRY.prompt_tokens(request_, base)
    assert (tokens.prompts, tokens.degraded) == ((), reason)
    assert tokens.total == request_.body_bytes // 4


@pytest.mark.parametrize(
    "request_",
    [
        chat("Hello"),
        chat([]),
        completion("id", 7),
        completion("id", [1, "two"]),
        completion("id", None),
    ],
)
def test_a_prompt_of_the_wrong_type_is_a_400(request_: RouteRequest) -> None:
    """What the API does not allow is the client's error, not a reason to degrade."""
    with pytest.raises(RequestError) as caught:
        REGISTRY.prompt_tokens(request_, TINY)
    assert caught.value.status == 400
    assert caught.value.param


def test_text_that_no_context_holds_is_not_encoded() -> None:
    """A prompt that every engine refuses costs the router no tokenizing."""
    longest = REGISTRY.prompt_tokens(completion("id", "a" * 8 * TOKENIZER.token_chars_max), TINY, 8)
    assert longest.degraded is None
    longer = REGISTRY.prompt_tokens(completion("id", "a" * (8 * TOKENIZER.token_chars_max + 1)), TINY, 8)
    assert (longer.prompts, longer.degraded) == ((), "longer_than_context")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=6
    )
)
def test_hostile_prompts_never_raise_anything_else(prompt: object) -> None:
    """Any prompt gives tokens, a reason, or a 400."""
    status = 400
    try:
        tokens = REGISTRY.prompt_tokens(completion("id", prompt), TINY)
    except RequestError as error:
        status = error.status
    else:
        assert tokens.degraded in (None, "tokenize_error")
        assert tokens.total >= 0
    assert status == 400


def test_a_directory_without_a_tokenizer_stops_the_start(tmp_path: Path) -> None:
    """A wrong --tokenizer names the flag, the model and the directory."""
    with pytest.raises(ConfigError, match=rf"--tokenizer m={tmp_path}"):
        TokenizerRegistry.load({"m": tmp_path})
