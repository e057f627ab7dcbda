"""Shapes of the OpenAI responses: whole answers, stream chunks, usage.

In: texts and counts. Out: dicts ready for JSON. Knows nothing of HTTP, the engine, or how text came about.
"""

import time
from collections.abc import Sequence
from typing import Any

from model_server.prepare import Job
from model_server.text import Delta

Json = dict[str, Any]


class Responder:
    """Makes all that is sent back for one job.

    Args:
        job: The request that is answered.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._chat = job.api == "chat"
        self._created = int(time.time())
        self._opened: set[int] = set()
        options = job.fields.stream_options
        self.usage_last = options is not None and bool(options.include_usage)
        self.usage_always = self.usage_last and options is not None and bool(options.continuous_usage_stats)

    def whole(self, texts: Sequence[str], ends: Sequence[Delta], usage: Json) -> Json:
        """The answer to a request that does not stream; one text and one last delta per choice."""
        choices = [
            self._choice(index, text, end) for index, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def chunks(self, index: int, delta: Delta, usage: Json | None) -> list[Json]:
        """The chunks that carry one choice's delta; later than the first, only if it says something."""
        chunks = []
        opens = index not in self._opened
        self._opened.add(index)
        if self._chat and opens:
            chunks.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, usage))
        if delta.text or delta.finish_reason is not None or (opens and not self._chat):
            chunks.append(self._chunk(index, self._said(delta), delta, usage))
        return chunks

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk of a stream that asked for usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def usage(self, completion_tokens: int, cached_tokens: int) -> Json:
        """Token counts so far."""
        prompt_tokens = self._job.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _head(self, chat_object: str) -> Json:
        return {
            "id": self._job.request_id,
            "object": chat_object if self._chat else "text_completion",
            "created": self._created,
            "model": self._job.model,
        }

    def _choice(self, index: int, text: str, end: Delta) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        said: Json = {"message": message} if self._chat else {"text": text}
        return {"index": index, **said, **_end(end)}

    def _said(self, delta: Delta) -> Json:
        if not self._chat:
            return {"text": delta.text}
        return {"delta": {"content": delta.text} if delta.text else {}}

    def _chunk(self, index: int, said: Json, delta: Delta | None, usage: Json | None) -> Json:
        chunk = self._head("chat.completion.chunk")
        chunk["choices"] = [{"index": index, **said, **_end(delta)}]
        if self.usage_last:
            chunk["usage"] = usage if self.usage_always else None
        return chunk


def _end(delta: Delta | None) -> Json:
    return {
        "logprobs": None,
        "finish_reason": delta.finish_reason if delta else None,
        "stop_reason": delta.stop_reason if delta else None,
    }
