"""Tokenization of requests: the engine's token ids, or a counted reason why they are unknown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from router.errors import ConfigError, RequestError
from router.prompts.parsers import OWN_PARSERS
from router.prompts.remote_tokenizers import read_rendered
from router.prompts.request import MEDIA, PromptTokens, RequestKind, RouteRequest
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.router.bench import TINY, TOKENIZER, completion
from tests.support.tokenization.media import CASES, answer
from tokenization import TINY_DIRECTORY, PromptTokenizer, TokenIds
from tokenization.prompts import chat_prompt


class BrokenTokenizer(PromptTokenizer):
    """Tokenizer that always fails."""

    def token_ids(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Fail."""
        raise RuntimeError("broken")


class SlowTokenizer(PromptTokenizer):
    """Tokenizer that encodes only when released, like one on an overloaded machine."""

    go: threading.Event
    encoded: threading.Semaphore

    def token_ids(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Encode when released."""
        assert self.go.wait(300)
        ids = super().token_ids(text, add_special_tokens=add_special_tokens)
        self.encoded.release()
        return ids


# Never receives messages as JSON text, so it checks all of them.
DECODED = PromptTokenizer.from_directory(TINY_DIRECTORY)
REGISTRY = TokenizerRegistry({TINY: TOKENIZER, "broken": BrokenTokenizer.from_directory(TINY_DIRECTORY)})
MESSAGES = [{"role": "user", "content": "Hello there"}]


# Larger than the limit for inline tokenization.
LONG = " ".join(f"word {at}" for at in range(20_000))


def chat(messages: object, **fields: object) -> RouteRequest:
    """Return a chat request."""
    body = {"model": TINY, "messages": messages, **fields}
    return RouteRequest("id", RequestKind.CHAT, TINY, body, body_bytes=400)


def lists(tokens: PromptTokens) -> list[list[int]]:
    """Return the prompts as lists."""
    return [prompt.tolist() for prompt in tokens.prompts]


def test_a_chat_has_the_engines_token_ids() -> None:
    """Chat messages give the same token ids in the router and in the model server."""
    tokens = REGISTRY.prompt_tokens(chat(MESSAGES), TINY)
    assert lists(tokens) == [chat_prompt({"messages": MESSAGES}, TOKENIZER).tolist()]
    assert tokens.prompts[0].dtype == np.uint32
    assert (tokens.total, tokens.degraded, tokens.partial) == (len(tokens.prompts[0]), None, None)


def test_a_growing_chat_has_the_engines_token_ids() -> None:
    """A chat that grows turn by turn, with most bytes cached, has the ids of the same decoded messages."""
    messages: list[dict[str, str]] = []
    for turn in range(12):
        role = "user" if turn % 2 == 0 else "assistant"
        messages.append({"role": role, "content": f"{turn} " + "some words, " * 400})
        body = {"model": TINY, "messages": messages}
        request = OWN_PARSERS.parse("r", "/v1/chat/completions", msgspec.json.encode(body))[0]
        (ids,) = REGISTRY.prompt_tokens(request, TINY).prompts
        assert ids.tolist() == chat_prompt(body, DECODED).tolist()


def test_several_prompts_are_several_token_lists() -> None:
    """A completions request with two prompts counts the tokens of both."""
    tokens = REGISTRY.prompt_tokens(completion("id", ["one", "two words"]), TINY)
    assert lists(tokens) == [TOKENIZER.encode("one"), TOKENIZER.encode("two words")]
    assert tokens.total == sum(map(len, tokens.prompts))


@pytest.mark.parametrize(("prompt", "ids"), [([1, 2, 3], [[1, 2, 3]]), ([[1], [2, 3]], [[1], [2, 3]])])
def test_a_prompt_of_token_ids_needs_no_tokenizer(prompt: object, ids: list[list[int]]) -> None:
    """Given token ids are used unchanged, even for a model without tokenizer."""
    tokens = REGISTRY.prompt_tokens(completion("id", prompt), "unknown")
    assert (lists(tokens), tokens.degraded) == (ids, None)


def test_ids_above_the_vocabulary_are_accepted() -> None:
    """Token ids beyond the tokenizer's vocabulary are routed, because checkpoints pad their embeddings."""
    tokens = REGISTRY.prompt_tokens(completion("id", [5, TOKENIZER.vocab_size + 7]), TINY)
    assert (lists(tokens), tokens.degraded) == ([[5, TOKENIZER.vocab_size + 7]], None)


@pytest.mark.parametrize("name", ["two_images", "sound_and_image", "text"])
def test_given_ids_keep_their_media_items(name: str) -> None:
    """A prompt in vLLM's generate format keeps the hashes and ranges of its images."""
    rendered = CASES[name]["rendered"]
    body = {"token_ids": rendered["token_ids"], "features": rendered["features"]}
    request = completion("id", rendered["token_ids"], **body)
    tokens, expected = (
        REGISTRY.prompt_tokens(request, "unknown"),
        read_rendered(RequestKind.CHAT, answer(name)),
    )
    assert (lists(tokens), tokens.media) == (lists(expected), expected.media)
    assert (tokens.degraded, tokens.partial) == (None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"content_parts": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"image_data": "data:,"},
        {"features": 5},
        {"features": {"mm_placeholders": {"image": [{"offset": 1, "length": 9}]}}},
    ],
)
def test_ids_with_unplaced_images_are_routed_by_load(fields: dict[str, object]) -> None:
    """Ids with images of unknown position, or with inconsistent features, are routed by load."""
    tokens = REGISTRY.prompt_tokens(completion("id", [1, 2, 3], **fields), TINY)
    assert (tokens.prompts, tokens.degraded) == ((), "unsupported_prompt")


def test_an_image_without_hash_ends_the_known_prefix() -> None:
    """Without hashes, the known prefix of given ids ends at the first placeholder."""
    features = {"mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}
    tokens = REGISTRY.prompt_tokens(completion("id", [1, 2, 2, 3], features=features), TINY)
    assert (lists(tokens), tokens.total, tokens.partial) == ([[1]], 4, MEDIA)


def test_a_chat_with_an_image_is_known_up_to_it() -> None:
    """The token ids before an image are known, with the reason why the rest is not."""
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": [image]}]
    tokens = REGISTRY.prompt_tokens(chat(body), TINY)
    assert (tokens.degraded, tokens.partial) == (None, MEDIA)
    (ids,) = lists(tokens)
    assert ids == chat_prompt({"messages": body[:1]}, TOKENIZER).tolist()[: len(ids)]
    assert 0 < len(ids) < tokens.total


@pytest.fixture
def slow() -> Iterator[SlowTokenizer]:
    """Yield a tokenizer that blocks until the end of the test."""
    tokenizer = SlowTokenizer.from_directory(TINY_DIRECTORY)
    tokenizer.go, tokenizer.encoded = threading.Event(), threading.Semaphore(0)
    yield tokenizer
    tokenizer.go.set()


def test_a_late_prompt_is_routed_by_load(slow: SlowTokenizer) -> None:
    """After the deadline the reason is returned at once; the next request may succeed."""
    registry = TokenizerRegistry({TINY: slow}, options=TokenizeOptions(deadline_s=0.01))
    request = completion("id", LONG)
    late = registry.prompt_tokens(request, TINY)
    assert (late.prompts, late.degraded) == ((), "tokenize_deadline")
    assert late.total == request.body_bytes // 4
    slow.go.set()
    assert slow.encoded.acquire(timeout=300)
    registry.close()
    patient = TokenizerRegistry({TINY: slow}, options=TokenizeOptions(deadline_s=300))
    known = patient.prompt_tokens(request, TINY)
    assert (lists(known), known.degraded) == ([TOKENIZER.encode(LONG)], None)
    patient.close()


def test_a_full_queue_is_reported(slow: SlowTokenizer) -> None:
    """With one prompt in work and one queued, the third is rejected with the reason."""
    options = TokenizeOptions(deadline_s=0.01, threads=1, waiting_max=1)
    registry = TokenizerRegistry({TINY: slow}, options=options)
    reasons = [registry.prompt_tokens(completion("id", LONG), TINY).degraded for _ in range(3)]
    assert reasons == ["tokenize_deadline", "tokenize_deadline", "tokenize_queue_full"]
    slow.go.set()
    assert slow.encoded.acquire(timeout=300)
    assert slow.encoded.acquire(timeout=300)
    registry.close()
    assert registry.prompt_tokens(completion("id", LONG), TINY).degraded == "tokenize_queue_full"


def test_small_requests_need_no_pool_thread(slow: SlowTokenizer) -> None:
    """A busy pool does not delay a small request."""
    options = TokenizeOptions(deadline_s=0.05, threads=1, waiting_max=0)
    registry = TokenizerRegistry({TINY: slow}, options=options)
    assert registry.prompt_tokens(completion("id", LONG), TINY).degraded == "tokenize_deadline"
    assert registry.prompt_tokens(completion("id", LONG), TINY).degraded == "tokenize_queue_full"
    slow.go.set()
    assert registry.prompt_tokens(completion("id", "short"), TINY).degraded is None
    registry.close()


def test_the_library_alone_has_a_lower_inline_limit() -> None:
    """A text that the fast encoder handles inline is tokenized in the pool without it."""
    library = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    library.normalizer = normalizers.NFKC()
    tokenizers = {"fast": TOKENIZER, "library": PromptTokenizer(library, None, frozenset())}
    registry = TokenizerRegistry(tokenizers)
    registry.close()
    request = completion("id", "some words " * 2000)
    reasons = [registry.prompt_tokens(request, model).degraded for model in tokenizers]
    assert reasons == [None, "tokenize_queue_full"]


def test_a_large_body_is_tokenized_in_the_pool() -> None:
    """A body that takes long to parse and render is subject to the deadline."""
    registry = TokenizerRegistry({TINY: TOKENIZER}, options=TokenizeOptions(deadline_s=60, threads=1))
    registry.close()
    huge = RouteRequest("id", RequestKind.CHAT, TINY, {"messages": MESSAGES}, body_bytes=2 << 20)
    assert registry.prompt_tokens(huge, TINY).degraded == "tokenize_queue_full"
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": MESSAGES, "tools": tools}
    many = RouteRequest("id", RequestKind.CHAT, TINY, body, body_bytes=200 << 10)
    assert registry.prompt_tokens(many, TINY).degraded == "tokenize_queue_full"


@pytest.mark.parametrize(
    ("request_", "base", "reason"),
    [
        (chat(MESSAGES), "other", "no_tokenizer"),
        (chat(MESSAGES), None, "no_tokenizer"),
        (
            chat([{"role": "user", "content": [{"type": "hologram"}]}]),
            TINY,
            "unsupported_prompt",
        ),
        (chat([{"role": "user", "content": [{"prompt_embeds": "A"}]}]), TINY, "unsupported_prompt"),
        # Some engines can be configured to accept these.
        (chat(MESSAGES, chat_template="{{ messages }}"), TINY, "unsupported_prompt"),
        (chat(MESSAGES, chat_template_kwargs={"chat_template": "x"}), TINY, "unsupported_prompt"),
        (chat(MESSAGES, chat_template_kwargs={"tools": "x"}), TINY, "unsupported_prompt"),
        (chat(MESSAGES), "broken", "tokenize_error"),
        (completion("id", "\ud800"), TINY, "unsupported_prompt"),
        (RouteRequest("id", RequestKind.PASSTHROUGH, body_bytes=400), TINY, "passthrough"),
    ],
)
def test_failures_degrade_with_a_reason(request_: RouteRequest, base: str | None, reason: str) -> None:
    """A missing or failing tokenizer gives a reason and an estimated number of tokens."""
    tokens = REGISTRY.prompt_tokens(request_, base)
    assert (tokens.prompts, tokens.degraded) == ((), reason)
    assert tokens.total == request_.body_bytes // 4


@pytest.mark.parametrize(
    "request_",
    [
        chat("Hello"),
        chat([]),
        chat([{"role": "user", "content": [{"text": "no type"}]}]),
        chat([{"role": "user", "content": [{"type": ["text"], "text": "two types"}]}]),
        completion("id", 7),
        completion("id", [1, "two"]),
        completion("id", None),
    ],
)
def test_a_prompt_of_the_wrong_type_is_a_400(request_: RouteRequest) -> None:
    """A prompt that is invalid for its API raises RequestError 400."""
    with pytest.raises(RequestError) as caught:
        REGISTRY.prompt_tokens(request_, TINY)
    assert caught.value.status == 400
    assert caught.value.param


@pytest.mark.parametrize("field", ["image_url", "image_pil", "audio_url", "input_audio", "video_url"])
def test_media_are_recognised_by_their_field(field: str) -> None:
    """A content part without type is identified by its field, as in engines, and ends the known prefix."""
    typed, untyped = (
        REGISTRY.prompt_tokens(
            chat([*MESSAGES, {"role": "user", "content": [{**kind, field: "http://host/it"}]}]), TINY
        )
        for kind in ({"type": field}, {})
    )
    assert untyped.partial == MEDIA
    assert lists(untyped) == lists(typed) != [[]]


def test_text_longer_than_the_context_is_not_encoded() -> None:
    """A prompt that every engine rejects is not tokenized."""
    longest = REGISTRY.prompt_tokens(completion("id", "a" * 8 * TOKENIZER.token_chars_max), TINY, 8)
    assert longest.degraded is None
    longer = REGISTRY.prompt_tokens(completion("id", "a" * (8 * TOKENIZER.token_chars_max + 1)), TINY, 8)
    assert (longer.prompts, longer.degraded) == ((), "longer_than_context")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=6
    )
)
def test_hostile_prompts_raise_only_request_errors(prompt: object) -> None:
    """Any prompt gives tokens, a reason, or a 400."""
    status = 400
    try:
        tokens = REGISTRY.prompt_tokens(completion("id", prompt), TINY)
    except RequestError as error:
        status = error.status
    else:
        assert tokens.degraded in (None, "unsupported_prompt")
        assert tokens.total >= 0
    assert status == 400


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{tmp}", "no such file"),
        ("hf:name@main", "must have the form hf:OWNER/NAME@REVISION"),
        ("hf:owner/name", "must have the form hf:OWNER/NAME@REVISION"),
        ("unix:", "must have the form unix:PATH"),
        ("http://", "must have the form http://HOST:PORT"),
    ],
)
def test_an_invalid_source_stops_the_start(tmp_path: Path, source: str, problem: str) -> None:
    """An invalid --tokenizer is reported with flag, model, source and problem."""
    source = source.format(tmp=tmp_path)
    with pytest.raises(ConfigError, match=f"--tokenizer m={source}: .*{problem}"):
        TokenizerRegistry(open_tokenizers({"m": source}))
