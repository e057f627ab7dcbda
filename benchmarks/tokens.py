"""CPU of a prompt's token ids in the router, compared with the bare tokenizer library.

`python -m benchmarks.tokens [--json] [--quick] [--tokenizer DIR] [--rounds N]`. Texts are English prose, and
new except for what a conversation repeats. Figures are CPU of the whole process, medians over rounds:

- `next_turn_16k_ms`: a conversation of about 16,000 tokens continues by 300 characters, from the body's bytes
  to the ids; `next_turn_library_ms` is those 300 characters through the tokenizer library.
- `first_turn_16k_qwen3_ms`, `next_turn_16k_qwen3_ms`: a new conversation of this size, and its next turn,
  with a vocabulary of 130,000 tokens and a template like Qwen3's (qwen3_template.jinja);
  `next_turn_16k_fallback_ms`: the next turn where the tokenizer library has to encode.
- `other_question_16k_ms`: another question of 100 characters after all but the last of these messages.
- `next_turn_16k_reasoning_ms`: the next turn with a template that inspects other messages, like those of
  reasoning models with tools (reasoning_template.jinja), with the default tokenizer only;
  `render_16k_reasoning_ms`: rendering all its messages.
- `next_turn_16k_anthropic_ms`, `next_turn_16k_responses_ms`: the next turn through these APIs.
- `next_turn_of_many_ms`: the next turn of 500 such conversations that continue in turn, by two turns each.
- `cold_16k_ms`: a text of 16,000 tokens; `cold_16k_library_ms`: the same text through the library.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
from tokenizers import Tokenizer, normalizers

from benchmarks.large_vocabulary import qwen_tokenizer
from benchmarks.report import cpu_s, options_of, options_parser
from router.prompts.parsers import OWN_PARSERS
from router.prompts.request import RequestKind, RouteRequest, api_request
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tokenization import TINY_DIRECTORY
from tokenization.templates.chat_template import ChatTemplate
from tokenization.tokenizer import PromptTokenizer

_MODEL, _REASONING, _QWEN3, _FALLBACK = "bench", "reasoning", "qwen3", "fallback"
_REASONING_TEMPLATE = Path(__file__).with_name("reasoning_template.jinja")
_QWEN3_TEMPLATE = Path(__file__).with_name("qwen3_template.jinja")
_CONTEXT_TOKENS = 16_000
_SAMPLE_CHARS = 50_000
_QUESTION_CHARS = 300
_ANSWER_CHARS = 1200
_NEW_ANSWER_CHARS = 200
_NEW_QUESTION_CHARS = 100
# Far away, so that a busy machine cannot turn the measured work into a rejection.
_DEADLINE_S = 30.0
_MANY, _MANY_QUICK = 500, 4
_PATHS = {
    "chat": ("/v1/chat/completions", "messages"),
    "anthropic": ("/v1/messages", "messages"),
    "responses": ("/v1/responses", "input"),
}

Message = dict[str, Any]


def main() -> int:
    """Measure and print all figures."""
    parser = options_parser(__doc__, rounds=31)
    parser.add_argument(
        "--tokenizer", type=Path, default=TINY_DIRECTORY, help="directory of a model (default: the tiny one)"
    )
    read = parser.parse_args()
    options = options_of(read)
    options.report.machine()
    bench = Bench(read.tokenizer, is_quick=options.quick)
    figures = bench.measure(options.rounds)
    figures["next_turn_of_many_ms"] = bench.measure_many(options.of_size(_MANY, _MANY_QUICK))
    for name, seconds in figures.items():
        setting = {"cpu": "process", "prompt_tokens": bench.prompt_tokens, "tokenizer": read.tokenizer.name}
        options.report.figure(name, "ms", [1000 * one_s for one_s in seconds], **setting)
    return 0


class Bench:
    """One tokenizer and a supply of texts.

    Args:
        directory: Folder with a tokenizer.json and a chat template.
        is_quick: Use the vocabulary of `directory` instead of the large one, which takes seconds to load.

    Attributes:
        prompt_tokens: Median length of the next turns' prompts.
    """

    def __init__(self, directory: Path, *, is_quick: bool) -> None:
        self._library = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizers = {_MODEL: PromptTokenizer.from_directory(directory)}
        if directory == TINY_DIRECTORY:
            tokenizers[_REASONING] = _with_template(self._library, _REASONING_TEMPLATE)
        large = self._library if is_quick else qwen_tokenizer()
        tokenizers[_QWEN3] = _with_template(large, _QWEN3_TEMPLATE)
        # fastokens rejects this normalizer, which does not change these texts.
        refused = Tokenizer.from_str(large.to_str())
        refused.normalizer = normalizers.NFKC()
        tokenizers[_FALLBACK] = _with_template(refused, _QWEN3_TEMPLATE)
        self._tokenizers = tokenizers
        self._registry = TokenizerRegistry(tokenizers, options=TokenizeOptions(deadline_s=_DEADLINE_S))
        self._text = _prose()
        prose = self._prose(_SAMPLE_CHARS)
        self._chars, self._large_chars = (
            _CONTEXT_TOKENS * len(prose) // len(library.encode(prose).ids)
            for library in (self._library, large)
        )
        self.prompt_tokens = 0.0

    def measure(self, rounds: int) -> dict[str, list[float]]:
        """Return CPU seconds of every round by name."""
        figures: dict[str, list[float]] = {}
        lengths = []
        for _ in range(rounds):
            round_s, tokens = self._round()
            lengths.append(tokens)
            for name, took_s in round_s.items():
                figures.setdefault(name, []).append(took_s)
        self.prompt_tokens = statistics.median(lengths)
        return figures

    def measure_many(self, conversations: int) -> list[float]:
        """Return CPU seconds of every turn except the first ones."""
        talks = [self._conversation() for _ in range(conversations)]
        for talk in talks:
            self._tokens(_MODEL, talk)
        seconds = []
        for _ in range(2):
            talks = [self._longer(talk) for talk in talks]
            seconds += [self._turn_s(_MODEL, talk, "chat") for talk in talks]
        return seconds

    def _round(self) -> tuple[dict[str, float], int]:
        messages = self._conversation()
        longer = self._longer(messages)
        round_s = {"next_turn_16k_ms": self._next_turn_s(_MODEL, messages, longer)}
        talk = self._conversation(self._large_chars)
        longer_talk = self._longer(talk)
        round_s["first_turn_16k_qwen3_ms"] = self._turn_s(_QWEN3, talk, "chat")
        round_s["next_turn_16k_qwen3_ms"] = self._turn_s(_QWEN3, longer_talk, "chat")
        round_s["next_turn_16k_fallback_ms"] = self._next_turn_s(_FALLBACK, talk, longer_talk)
        if reasoning := self._tokenizers.get(_REASONING):
            round_s["next_turn_16k_reasoning_ms"] = self._next_turn_s(_REASONING, messages, longer)
            round_s["render_16k_reasoning_ms"] = cpu_s(lambda: reasoning.render_chat(longer))
        for api in ("anthropic", "responses"):
            # Without the system message, which Anthropic's API has in another field.
            talk = self._conversation()[1:]
            round_s[f"next_turn_16k_{api}_ms"] = self._next_turn_s(_MODEL, talk, self._longer(talk), api)
        other = [*messages[:-1], {"role": "user", "content": self._prose(_NEW_QUESTION_CHARS)}]
        round_s["other_question_16k_ms"] = self._next_turn_s(_MODEL, messages, other)
        new = self._prose(_NEW_ANSWER_CHARS + _NEW_QUESTION_CHARS)
        round_s["next_turn_library_ms"] = cpu_s(lambda: self._library.encode(new).ids)
        text = self._prose(self._chars)
        cold = api_request("cold", RequestKind.COMPLETIONS, {"model": _MODEL, "prompt": text}, len(text))
        round_s["cold_16k_ms"] = cpu_s(lambda: self._ids(cold, _MODEL))
        round_s["cold_16k_library_ms"] = cpu_s(lambda: self._library.encode(text).ids)
        return round_s, self._tokens(_MODEL, longer)

    def _next_turn_s(
        self, model: str, messages: list[Message], longer: list[Message], api: str = "chat"
    ) -> float:
        self._tokens(model, messages, api)
        return self._turn_s(model, longer, api)

    def _turn_s(self, model: str, messages: list[Message], api: str) -> float:
        body = _body(messages, api)
        return cpu_s(lambda: self._ids(OWN_PARSERS.parse("turn", _PATHS[api][0], body)[0], model))

    def _longer(self, messages: list[Message]) -> list[Message]:
        return [
            *messages,
            {"role": "assistant", "content": self._prose(_NEW_ANSWER_CHARS)},
            {"role": "user", "content": self._prose(_NEW_QUESTION_CHARS)},
        ]

    def _conversation(self, total_chars: int | None = None) -> list[Message]:
        total_chars = total_chars or self._chars
        messages = [{"role": "system", "content": self._prose(_ANSWER_CHARS)}]
        chars = _ANSWER_CHARS
        while chars < total_chars:
            messages.append({"role": "user", "content": self._prose(_QUESTION_CHARS)})
            messages.append({"role": "assistant", "content": self._prose(_ANSWER_CHARS)})
            chars += _QUESTION_CHARS + _ANSWER_CHARS
        return [*messages, {"role": "user", "content": self._prose(_QUESTION_CHARS)}]

    def _tokens(self, model: str, messages: list[Message], api: str = "chat") -> int:
        return self._ids(OWN_PARSERS.parse("turn", _PATHS[api][0], _body(messages, api))[0], model)

    def _ids(self, request: RouteRequest, model: str) -> int:
        tokens = self._registry.prompt_tokens(request, model)
        if tokens.degraded is not None:
            raise RuntimeError(f"not tokenized: {tokens.degraded}")
        return tokens.total

    def _prose(self, chars: int) -> str:
        text = ""
        while len(text) < chars:
            text += next(self._text)
        return text[:chars]


def _with_template(library: Tokenizer, template: Path) -> PromptTokenizer:
    """Return a tokenizer with another chat template."""
    source = template.read_text(encoding="utf-8")
    return PromptTokenizer(library, ChatTemplate(source, {}), frozenset())


def _body(messages: list[Message], api: str) -> bytes:
    return msgspec.json.encode({"model": _MODEL, _PATHS[api][1]: messages})


def _prose() -> Iterator[str]:
    """Yield the Python manual's paragraphs endlessly, each with different words at its start."""
    paragraphs = [part for topic in topics.values() for part in topic.split("\n\n") if len(part) > 200]
    turn = 0
    while True:
        for at, paragraph in enumerate(paragraphs):
            yield f"Note {turn * len(paragraphs) + at}. {paragraph}\n\n"
        turn += 1


if __name__ == "__main__":
    raise SystemExit(main())
