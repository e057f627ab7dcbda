"""The server-sent events of one streamed answer.

In: a generation, and what shapes its deltas. Out: pieces of the body, awaited one by one; or, once the body
is known, written as its tokens arrive. Knows nothing of how the generation came about.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from model_server.api_errors import ApiError
from model_server.generation import Generation
from model_server.http_protocol import DirectBody
from model_server.openai_responses import Responder
from model_server.text import Delta

_DONE = b"data: [DONE]\n\n"


class AnswerStream:
    """One streamed answer.

    Args:
        responder: Shapes the deltas.
        generation: Makes them.
    """

    def __init__(self, responder: Responder, generation: Generation) -> None:
        self._responder = responder
        self._generation = generation
        self._body: DirectBody | None = None

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Make the events; an error after the first piece is an event too.

        Raises:
            ApiError: There is no answer.
        """
        begun = False
        try:
            async for deltas in self._generation:
                if piece := self._piece(deltas):
                    yield piece
                    begun = True
            if self._responder.usage_last:
                yield self._responder.usage_event(usage(self._responder, self._generation))
        except ApiError as error:
            if not begun:
                raise
            yield b"data: " + error.body() + b"\n\n"
        yield _DONE

    def write_to(self, body: DirectBody) -> None:
        """From here on write what arrives while the next piece is awaited; the end is still a piece."""
        self._body = body
        self._generation.divert(self._write)

    def _write(self) -> bool:
        assert self._body is not None
        if not self._body.writable:
            return False
        if piece := self._piece(self._generation.take()):
            self._body.write(piece)
        return True

    def _piece(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        responder = self._responder
        counts = usage(responder, self._generation) if responder.usage_always else None
        piece = b""
        for index, delta in deltas:
            piece += responder.events(index, delta, counts)
        return piece


def usage(responder: Responder, generation: Generation) -> dict[str, Any]:
    """What the answer has cost so far."""
    return responder.usage(generation.completion_tokens, generation.cached_tokens)
