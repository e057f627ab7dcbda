"""A client of PickEndpoint, for gateways and scripts that send their requests themselves.

A request's model and input in, the pod to use out; how it went on goes back, so that the pod's load is known:

    with PickerClient("127.0.0.1:9002") as picker, picker.pick("my-model", messages=messages) as pick:
        for chunk in stream_from(f"http://{pick.address}"):
            pick.first_token()  # said again, it changes nothing
        pick.done()

Knows gRPC; sends nothing to pods.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from router._pb import endpoint_picker_pb2 as pb
from router._pb import endpoint_picker_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)

_OUTCOME = pb.ReportOutcomeRequest


class PickError(Exception):
    """The router gave no pod.

    Attributes:
        code: NOT_FOUND: no pod serves the model; INVALID_ARGUMENT: the request cannot be read;
            RESOURCE_EXHAUSTED: it was shed; UNAVAILABLE: no pod is ready, or no router is there;
            DEADLINE_EXCEEDED: no answer in time.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class PickerClient:
    """Asks one router; safe to share between threads.

    Args:
        target: "host:port" of the router's gRPC port.
        credentials: For TLS, for example `grpc.ssl_channel_credentials(ca_pem)`; None: plaintext.
        timeout_s: Deadline of every call.
        channel_options: Further options of the gRPC channel.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = 1.0,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        options = list(channel_options)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._timeout_s = timeout_s
        # The generated class has no types.
        stub: Any = pb_grpc.EndpointPickerStub
        self._stub = stub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; idempotent."""
        self._channel.close()

    def pick(
        self,
        model: str,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_options: Mapping[str, Any] | None = None,
        request_id: str = "",
        headers: Mapping[str, str] | None = None,
        candidates: Sequence[str] = (),
        cache_salt: str = "",
    ) -> Pick:
        """Asks for a pod.

        Args:
            model: A base model's name, or a LoRA adapter's.
            messages: OpenAI chat messages; at most one of `messages`, `prompt` and `token_ids`, and without
                any the pick is by load alone.
            tools: OpenAI tools of a chat.
            chat_options: Of a chat: chat_template_kwargs, add_generation_prompt, continue_final_message,
                add_special_tokens.
            request_id: Made up where empty.
            headers: HTTP headers of the request, names in lower case.
            candidates: "ip:port" of the pods that may be picked; empty: all.

        Raises:
            PickError: There is no pod to use.
            ValueError: More than one input.
        """
        request = pb.PickEndpointRequest(
            request_id=request_id,
            model=model,
            headers=dict(headers or {}),
            candidates=candidates,
            cache_salt=cache_salt,
        )
        if sum(given is not None for given in (messages, prompt, token_ids)) > 1:
            raise ValueError("give one of messages, prompt and token_ids")
        if messages is not None:
            optional = {"tools_json": tools, "options_json": chat_options}
            written = {name: json.dumps(given).encode() for name, given in optional.items() if given}
            request.chat.CopyFrom(pb.ChatInput(messages_json=json.dumps(messages).encode(), **written))
        elif prompt is not None:
            request.prompt = prompt
        elif token_ids is not None:
            request.token_ids.ids.extend(token_ids)
        try:
            answer = self._stub.PickEndpoint(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise PickError(error.code(), error.details() or str(error.code())) from error
        return Pick(self, answer)

    def report(self, request: pb.ReportOutcomeRequest) -> bool | None:
        """Tells how a request went on; a router that cannot be told is no reason to fail the request.

        Returns:
            Whether the router knows the request; None when it could not be told.
        """
        try:
            return bool(self._stub.ReportOutcome(request, timeout=self._timeout_s).known)
        except grpc.RpcError as error:
            _log.warning("outcome of request %s not reported: %s", request.request_id, error.details())
            return None


class Pick:
    """A picked pod, and the way back for how the request went on.

    As a context it reports the end by itself, unless done() or failed() was called: done, or failed where an
    exception passes. Each thing is reported once.

    Attributes:
        endpoints: Best first, never empty: each with `address`, `pod_name`, `cost_s`, `cached_tokens` and
            the other fields of endpoint_picker.proto.
        reason: One sentence for a person.
        degraded: Why the pick was made without the cache's view; empty: it was made with it.
    """

    def __init__(self, client: PickerClient, answer: pb.PickEndpointResponse) -> None:
        self._client = client
        self._told: pb.ReportOutcomeRequest.Outcome | None = None
        self.request_id: str = answer.request_id
        self.endpoints: Sequence[pb.RankedEndpoint] = answer.endpoints
        self.reason: str = answer.reason
        self.degraded: str = answer.degraded
        self.prompt_tokens: int = answer.prompt_tokens

    @property
    def address(self) -> str:
        """The pod to use, as "ip:port"."""
        return self.endpoints[0].address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if error_type is None:
            self.done()
        else:
            self.failed()

    def first_token(self) -> None:
        self._report(_OUTCOME.OUTCOME_FIRST_TOKEN)

    def done(self, *, cached_tokens: int | None = None) -> None:
        """The answer is complete.

        Args:
            cached_tokens: usage.prompt_tokens_details.cached_tokens, where the engine told it.
        """
        self._report(_OUTCOME.OUTCOME_DONE, cached_tokens)

    def failed(self) -> None:
        self._report(_OUTCOME.OUTCOME_FAILED)

    def _report(self, outcome: pb.ReportOutcomeRequest.Outcome, cached_tokens: int | None = None) -> None:
        # Each thing is reported once, and nothing after the end.
        if self._told not in (None, _OUTCOME.OUTCOME_FIRST_TOKEN) or self._told == outcome:
            return
        self._told = outcome
        self._client.report(
            _OUTCOME(
                request_id=self.request_id,
                outcome=outcome,
                cached_tokens=cached_tokens,
                address=self.address,
            )
        )
