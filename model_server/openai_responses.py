"""Shapes of the OpenAI responses: whole answers, stream chunks, usage.

In: texts and counts. Out: dicts ready for JSON, and the events of a stream. Knows nothing of HTTP, the
engine, or how text came about.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from model_server.openai_logprobs import chat_logprobs, completion_logprobs
from model_server.prepare import Job
from model_server.requests import ChosenToken
from model_server.text import Delta
from tokenization import PromptTokenizer

Json = dict[str, Any]


class Responder:
    """Makes all that is sent back for one job.

    Args:
        job: The request that is answered.
        tokenizer: Spells tokens where log probabilities are told.
    """

    def __init__(self, job: Job, tokenizer: PromptTokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._shown_chars = list(map(len, job.echoed))
        self._chat = job.api == "chat"
        self._tells_ids = bool(job.fields.return_token_ids)
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        options = job.fields.stream_options
        self.usage_last = options is not None and bool(options.include_usage)
        self.usage_always = self.usage_last and options is not None and bool(options.continuous_usage_stats)

    def whole(self, answers: Sequence[Delta], usage: Json) -> Json:
        """The answer to a request that does not stream; all that was said, per choice."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        body = {**self._head("chat.completion"), "choices": choices, "usage": usage}
        if self._chat:
            body["prompt_token_ids"] = self._prompt_ids(0)
        return body

    def events(self, index: int, delta: Delta, usage: Json | None) -> bytes:
        """The events that carry one choice's delta; later than the first, only if it says something."""
        plain = self._plain.get(index)
        ends_or_tells = delta.finish_reason is not None or delta.tokens or delta.token_ids
        if plain is not None and delta.text and not ends_or_tells and usage is None:
            return plain[0] + msgspec.json.encode(delta.text) + plain[1]
        chunks = []
        opens = index not in self._opened
        self._opened.add(index)
        if self._chat and opens:
            chunks.append(self._role_chunk(index, usage))
        if delta.text or ends_or_tells or (opens and not self._chat):
            text = self._job.echoed[index] + delta.text if opens else delta.text
            chunks.append(self._chunk(index, self._said(text), delta, usage, opens=opens))
        if opens:
            self._plain[index] = self._around_text(index)
        return b"".join(map(_event, chunks))

    def usage_event(self, usage: Json) -> bytes:
        """The last event of a stream that asked for usage."""
        return _event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})

    def usage(self, completion_tokens: int, cached_tokens: Sequence[int]) -> Json:
        """Token counts so far: generated ones together, cached ones per choice."""
        prompt_tokens = self._job.prompt_tokens
        # The copies of one prompt share its cached prefix: it counts once, as its tokens do.
        cached = sum(cached_tokens[:: self._job.fields.n or 1])
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event that has nothing else to say."""
        mark = "\0"
        event = _event(self._chunk(index, self._said(mark), None, None))
        # The last one: a model's or a request's name may hold anything, but stands before the text.
        before, _, after = event.rpartition(msgspec.json.encode(mark))
        return before, after

    def _head(self, chat_object: str) -> Json:
        return {
            "id": self._job.request_id,
            "object": chat_object if self._chat else "text_completion",
            "created": self._created,
            "model": self._job.model,
        }

    def _choice(self, index: int, answer: Delta) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        said: Json = {"message": message} if self._chat else {"text": self._job.echoed[index] + answer.text}
        choice = {"index": index, **said, **self._end(index, answer), "token_ids": self._ids(answer)}
        if not self._chat:
            choice["prompt_token_ids"] = self._prompt_ids(index)
        return choice

    def _said(self, text: str) -> Json:
        if not self._chat:
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def _role_chunk(self, index: int, usage: Json | None) -> Json:
        """A chat's first chunk, which vLLM lets tell the prompt's ids and no others."""
        said = {"delta": {"role": "assistant", "content": ""}}
        chunk = self._chunk_of({"index": index, **said, **self._end(index, None)}, usage)
        return {**chunk, "prompt_token_ids": self._prompt_ids(index)}

    def _chunk(
        self, index: int, said: Json, delta: Delta | None, usage: Json | None, *, opens: bool = False
    ) -> Json:
        choice = {"index": index, **said, **self._end(index, delta), "token_ids": self._ids(delta)}
        if not self._chat:
            choice["prompt_token_ids"] = self._prompt_ids(index) if opens else None
        return self._chunk_of(choice, usage)

    def _chunk_of(self, choice: Json, usage: Json | None) -> Json:
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.usage_last:
            chunk["usage"] = usage if self.usage_always else None
        return chunk

    def _ids(self, delta: Delta | None) -> Sequence[int] | None:
        return delta.token_ids if self._tells_ids and delta is not None else None

    def _prompt_ids(self, index: int) -> Sequence[int] | None:
        return self._job.prompts[index // (self._job.fields.n or 1)] if self._tells_ids else None

    def _end(self, index: int, delta: Delta | None) -> Json:
        return {
            "logprobs": self._logprobs(index, delta.tokens) if delta and delta.tokens else None,
            "finish_reason": delta.finish_reason if delta else None,
            "stop_reason": delta.stop_reason if delta else None,
        }

    def _logprobs(self, index: int, tokens: Sequence[ChosenToken]) -> Json:
        if self._chat:
            return chat_logprobs(tokens, self._tokenizer)
        told = completion_logprobs(tokens, self._tokenizer, self._shown_chars[index])
        self._shown_chars[index] += sum(map(len, told["tokens"]))
        return told


def _event(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
