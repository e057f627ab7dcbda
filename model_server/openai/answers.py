"""OpenAI response bodies: whole answers, stream events, log probabilities and usage."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from model_server.openai.generation import Delta, Generation, joined
from model_server.openai.http_server import END_OF_EVENTS, ModelServerProtocol
from model_server.openai.prompts import Job
from model_server.openai.types import ApiError
from model_server.requests import ChosenToken
from tokenization import PromptTokenizer

Json = dict[str, Any]

# Shown for the logarithm of 0, which JSON cannot express; the same value as in vLLM.
_LEAST = -9999.0
_NOT_UTF8 = "\ufffd"
_EMPTY_DELTA = Delta("", None)


def completion_logprobs(tokens: Sequence[ChosenToken], tokenizer: PromptTokenizer, offset: int) -> Json:
    """Return the `logprobs` of a completion's choice, after `offset` characters of text."""
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token in tokens:
        assert token.logprobs is not None
        text, own = _text(tokenizer, token.token_id), _shown(token.logprobs.chosen)
        best = {_text(tokenizer, other): _shown(logprob) for other, logprob in token.logprobs.top}
        for values, value in zip(result.values(), (offset, own, text, {text: own, **best}), strict=True):
            values.append(value)
        offset += len(text)
    return result


def chat_logprobs(tokens: Sequence[ChosenToken], tokenizer: PromptTokenizer) -> Json:
    """Return the `logprobs` of a chat's choice."""

    def entry(token_id: int, logprob: float) -> Json:
        text = _text(tokenizer, token_id)
        # A token with a part of a character has no text to take bytes from.
        own_bytes = None if _NOT_UTF8 in text else list(text.encode())
        return {"token": text, "logprob": _shown(logprob), "bytes": own_bytes}

    content = []
    for token in tokens:
        assert token.logprobs is not None
        top = [entry(other, logprob) for other, logprob in token.logprobs.top]
        content.append({**entry(token.token_id, token.logprobs.chosen), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _text(tokenizer: PromptTokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _shown(logprob: float) -> float:
    # NaN, from overflowed logits, is not greater than the minimum and becomes a number too.
    return logprob if logprob > _LEAST else _LEAST


class Answer:
    """Response to one request, whole or streamed: the deltas of its generation in OpenAI's format."""

    def __init__(self, job: Job, tokenizer: PromptTokenizer, generation: Generation) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._generation = generation
        self._copies = job.fields.n or 1
        self._shown_chars = list(map(len, job.echoed))
        self._chat = job.api == "chat"
        self._returns_ids = bool(job.fields.return_token_ids)
        self._created = int(time.time())
        # Prefix and suffix of a text-only event, by choice; set with the choice's first event.
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        options = job.fields.stream_options
        self._usage_last = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_last and options is not None and bool(options.continuous_usage_stats)

    async def whole(self) -> Json:
        """Return the body of an answer that is not streamed."""
        received: list[list[Delta]] = [[] for _ in self._generation.texts]
        async for deltas in self._generation:
            for index, delta in deltas:
                received[index].append(delta)
        return self.body([joined(deltas) for deltas in received])

    def body(self, answers: Sequence[Delta]) -> Json:
        """Return the body with the complete answer of each choice."""
        choices = []
        for index, answer in enumerate(answers):
            message = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            own = message if self._chat else {"text": self._job.echoed[index] + answer.text}
            choices.append(self._choice(index, own, answer, self._prompt_ids(index)))
        body = {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}
        if self._chat:
            body["prompt_token_ids"] = self._prompt_ids(0)
        return body

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield stream events. An ApiError before the first event is raised; later it becomes an event."""
        begun = False
        try:
            async for deltas in self._generation:
                if piece := self._piece(deltas):
                    yield piece
                    begun = True
            if self._usage_last:
                head = self._head("chat.completion.chunk")
                yield _event({**head, "choices": [], "usage": self.usage()})
        except ApiError as error:
            if not begun:
                raise
            yield b"data: " + error.body() + b"\n\n"
        yield END_OF_EVENTS

    def write_to(self, connection: ModelServerProtocol) -> None:
        """Write events directly to a connection while `pieces` waits; `pieces` still yields the last one."""

        def write() -> bool:
            if not connection.writable:
                return False
            if piece := self._piece(self._generation.take()):
                connection.write_chunk(piece)
            return True

        self._generation.pass_on = write

    def _piece(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        usage = self.usage() if self._usage_always else None
        return b"".join([self.events(index, delta, usage) for index, delta in deltas])

    def events(self, index: int, delta: Delta, usage: Json | None) -> bytes:
        """Return the events of a choice's delta: none if it is empty and not the first."""
        plain = self._plain.get(index)
        has_details = delta.finish_reason is not None or delta.tokens or delta.token_ids
        if plain is not None and delta.text and not has_details and usage is None:
            return plain[0] + msgspec.json.encode(delta.text) + plain[1]
        chunks, prompt_ids, text = [], None, delta.text
        if plain is None:
            # Split at the last mark: names before the text may contain the mark as well.
            event = _event(self._chunk(self._choice(index, self._content("\0"), _EMPTY_DELTA), None))
            before, _, after = event.rpartition(msgspec.json.encode("\0"))
            self._plain[index] = before, after
            prompt_ids, text = self._prompt_ids(index), self._job.echoed[index] + text
            if self._chat:  # the role's chunk, which alone has the prompt ids, as in vLLM
                role = {"delta": {"role": "assistant", "content": ""}}
                chunk = self._chunk({"index": index, **role, **self._end(index, _EMPTY_DELTA)}, usage)
                chunks.append({**chunk, "prompt_token_ids": prompt_ids})
        if text or has_details or (plain is None and not self._chat):
            chunks.append(self._chunk(self._choice(index, self._content(text), delta, prompt_ids), usage))
        return b"".join(map(_event, chunks))

    def usage(self) -> Json:
        """Return the token counts so far."""
        prompt_tokens = sum(map(len, self._job.prompts))  # each prompt counts once
        texts = self._generation.texts
        completion_tokens = sum(text.completion_tokens for text in texts)
        # Copies of a prompt share its cached prefix, which counts once.
        cached = sum(text.cached_tokens for text in texts[:: self._copies])
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, chat_object: str) -> Json:
        return {
            "id": self._job.request_id,
            "object": chat_object if self._chat else "text_completion",
            "created": self._created,
            "model": self._job.model,
        }

    def _content(self, text: str) -> Json:
        if not self._chat:
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def _choice(
        self, index: int, content: Json, delta: Delta, prompt_ids: Sequence[int] | None = None
    ) -> Json:
        ids = delta.token_ids if self._returns_ids else None
        choice = {"index": index, **content, **self._end(index, delta), "token_ids": ids}
        return choice if self._chat else {**choice, "prompt_token_ids": prompt_ids}

    def _chunk(self, choice: Json, usage: Json | None) -> Json:
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": usage} if self._usage_last else chunk

    def _prompt_ids(self, index: int) -> Sequence[int] | None:
        return self._job.prompts[index // self._copies] if self._returns_ids else None

    def _end(self, index: int, delta: Delta) -> Json:
        return {
            "logprobs": self._logprobs(index, delta.tokens) if delta.tokens else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, index: int, tokens: Sequence[ChosenToken]) -> Json:
        if self._chat:
            return chat_logprobs(tokens, self._tokenizer)
        logprobs = completion_logprobs(tokens, self._tokenizer, self._shown_chars[index])
        self._shown_chars[index] += sum(map(len, logprobs["tokens"]))
        return logprobs


def _event(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
