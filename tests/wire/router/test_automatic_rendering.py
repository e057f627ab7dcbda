"""Rendering by the model's pods, which the router chooses by itself, over HTTP."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.prompts.remote_tokenizers import FAILURES_MAX
from router.prompts.request import RequestKind, RouteRequest
from router.prompts.tokenizer_sources import open_tokenizers
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.router.bench import completion, ready_pod
from tests.support.router.render import CHAT, COMPLETIONS, RESPONSES, Renderer, running_renderer
from tokenization import TINY_DIRECTORY

MODEL = "m"
IDS = json.dumps({"token_ids": [7, 8]}).encode()


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    """Yield a running renderer that renders chats, completions and responses."""
    with running_renderer() as running:
        running.answers = {CHAT: (200, IDS), COMPLETIONS: (200, b"[" + IDS + b"]"), RESPONSES: (200, IDS)}
        yield running


class Fleet:
    """Registry whose model has one pod, and the outcomes that the registry reports."""

    def __init__(self, renderer: Renderer, sources: dict[str, str], deadline_s: float = 30.0) -> None:
        self.outcomes: list[str] = []
        self.pods = [ready_pod(renderer.address)]
        self.registry = TokenizerRegistry(
            open_tokenizers(sources),
            TokenizeOptions(deadline_s),
            lambda _seconds, outcome: self.outcomes.append(outcome),
        )

    def ids(self, request: RouteRequest) -> list[list[int]] | str:
        """Return the ids of a request's prompts, or why there are none."""
        tokens = self.registry.prompt_tokens(request, MODEL, None, self.pods)
        return tokens.degraded or [prompt.tolist() for prompt in tokens.prompts]


def chat(text: str, kind: RequestKind = RequestKind.CHAT) -> RouteRequest:
    """Return a chat request, or one of another API."""
    body = {"messages": [{"role": "user", "content": text}], "input": text}
    return RouteRequest("id", kind, MODEL, body, body_bytes=400)


def test_pods_render_for_a_model_without_tokenizer(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without --tokenizer the model's pods render chats and completions; log, state and outcome say so."""
    fleet = Fleet(renderer, {})
    called: list[bool] = []
    fleet.registry.waits = lambda: called.append(True)
    with caplog.at_level(logging.INFO):
        assert [fleet.ids(chat("a")), fleet.ids(completion("id", "b"))] == [[[7, 8]], [[7, 8]]]
    assert caplog.text.count("prompts rendered by the model's pods: model=m") == 1
    assert fleet.registry.renderings()[MODEL]["state"] == "rendering"
    assert (fleet.outcomes, called) == (["ok", "ok"], [True])
    fleet.registry.close()


def test_pods_without_the_endpoint_are_asked_once(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    """Where pods have no render endpoint, one request asks, and the log names the flags."""
    renderer.answers = {CHAT: (404, b"{}")}
    fleet = Fleet(renderer, {})
    assert [fleet.ids(chat(text)) for text in "abc"] == ["no_tokenizer"] * 3
    assert (len(renderer.asked), fleet.outcomes) == (1, ["failed"])
    assert "--tokenizer m=DIR" in caplog.text
    assert "--enable-scale-out" in caplog.text
    state = fleet.registry.renderings()[MODEL]
    assert (state["state"], "404" in state["error"], "m=DIR" in state["instead"]) == ("paused", True, True)
    fleet.registry.close()


def test_failures_in_a_row_pause_rendering(renderer: Renderer) -> None:
    """Pods that fail after they worked are asked a few times more, and then not."""
    fleet = Fleet(renderer, {})
    assert fleet.ids(chat("works")) == [[7, 8]]
    renderer.answers[CHAT] = (500, b"")
    assert {fleet.ids(chat(str(at))) for at in range(FAILURES_MAX + 3)} == {"no_tokenizer"}
    assert fleet.outcomes == ["ok"] + ["failed"] * FAILURES_MAX
    fleet.registry.close()


def test_a_late_answer_counts_as_a_failure(renderer: Renderer) -> None:
    """An answer after the deadline is not waited for, and pauses rendering that has not worked before."""
    renderer.go.clear()
    fleet = Fleet(renderer, {}, deadline_s=0.05)
    assert fleet.ids(chat("a")) == "tokenize_deadline"
    assert fleet.ids(chat("b")) == "no_tokenizer"
    renderer.go.set()
    for _ in range(600):
        if fleet.outcomes:
            break
        time.sleep(0.05)
    assert (fleet.outcomes, len(renderer.asked)) == (["late"], 1)
    assert fleet.registry.renderings()[MODEL]["state"] == "paused"
    fleet.registry.close()


def test_none_means_that_load_decides(renderer: Renderer) -> None:
    """With the source `none` no pod is asked."""
    fleet = Fleet(renderer, {MODEL: "none"})
    assert fleet.ids(chat("a")) == "no_tokenizer"
    assert (renderer.asked, fleet.registry.renderings()) == ([], {})
    fleet.registry.close()


def test_pods_render_what_the_tokenizer_here_cannot(renderer: Renderer, tmp_path: Path) -> None:
    """Chats of a model that engines render by code go to the pods; its texts are encoded here."""
    (tmp_path / "tokenizer.json").write_bytes((TINY_DIRECTORY / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV32ForCausalLM"]}')
    fleet = Fleet(renderer, {MODEL: str(tmp_path)})
    assert fleet.ids(chat("a")) == [[7, 8]]
    assert fleet.ids(completion("id", "b")) not in ([[7, 8]], "no_tokenizer")
    renderer.answers[CHAT] = (403, b"")
    assert fleet.ids(chat("c")) == "unsupported_prompt"
    fleet.registry.close()


def test_a_chat_of_gpt_oss_is_rendered_here_and_a_response_by_pods(
    renderer: Renderer, tmp_path: Path
) -> None:
    """The library renders chats and messages of gpt-oss; requests of the Responses API go to the pods."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY_DIRECTORY / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    fleet = Fleet(renderer, {MODEL: str(tmp_path)})
    here = fleet.ids(chat("a"))
    assert here[0][0] == 200006
    assert fleet.ids(chat("a", RequestKind.MESSAGES)) == here
    assert renderer.asked == []
    assert fleet.ids(chat("a", RequestKind.RESPONSES)) == [[7, 8]]
    fleet.registry.close()


def test_requests_without_pods_ask_nobody(renderer: Renderer) -> None:
    """A model without pods, and a request without a model, have no tokenizer."""
    fleet = Fleet(renderer, {})
    for model, pods in ((MODEL, ()), (None, fleet.pods)):
        assert fleet.registry.prompt_tokens(chat("a"), model, None, pods).degraded == "no_tokenizer"
    assert fleet.registry.renderings() == {}
    fleet.registry.close()
