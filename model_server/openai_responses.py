"""Shapes of the OpenAI responses: whole answers, log probabilities, events of a stream, usage."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from model_server.generation import Generation
from model_server.http_server import DirectBody
from model_server.openai_types import ApiError
from model_server.prepare import Job
from model_server.requests import ChosenToken
from model_server.text import Delta, joined
from tokenization import PromptTokenizer

Json = dict[str, Any]

# What stands for the logarithm of 0, which JSON has no number for; vLLM's choice.
_LEAST = -9999.0
_NOT_UTF8 = "\ufffd"
_DONE = b"data: [DONE]\n\n"


def completion_logprobs(tokens: Sequence[ChosenToken], tokenizer: PromptTokenizer, offset: int) -> Json:
    """The `logprobs` of a completion's choice, which `offset` characters came before."""
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


class Responder:
    """Makes all that is sent back for one job."""

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


class Answer:
    """One answer, whole or streamed: what the generation makes, in the responder's shape."""

    def __init__(self, responder: Responder, generation: Generation) -> None:
        self._responder = responder
        self._generation = generation
        self._body: DirectBody | None = None

    async def whole(self) -> Json:
        """Collect the answer to a request that does not stream."""
        said: list[list[Delta]] = [[] for _ in self._generation.texts]
        async for deltas in self._generation:
            for index, delta in deltas:
                said[index].append(delta)
        return self._responder.whole([joined(deltas) for deltas in said], self._usage())

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Make the events; an ApiError before the first piece is raised, later it is an event too."""
        begun = False
        try:
            async for deltas in self._generation:
                if piece := self._piece(deltas):
                    yield piece
                    begun = True
            if self._responder.usage_last:
                yield self._responder.usage_event(self._usage())
        except ApiError as error:
            if not begun:
                raise
            yield b"data: " + error.body() + b"\n\n"
        yield _DONE

    def write_to(self, body: DirectBody) -> None:
        """From here on write what arrives while the next piece is awaited; the end is still a piece."""
        self._body = body
        self._generation.pass_on = self._write

    def _write(self) -> bool:
        assert self._body is not None
        if not self._body.writable:
            return False
        if piece := self._piece(self._generation.take()):
            self._body.write(piece)
        return True

    def _piece(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        counts = self._usage() if self._responder.usage_always else None
        return b"".join([self._responder.events(index, delta, counts) for index, delta in deltas])

    def _usage(self) -> Json:
        return self._responder.usage(self._generation.completion_tokens, self._generation.cached_tokens)
