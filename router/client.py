"""Client of PickEndpoint, for gateways and scripts that send requests to pods themselves.

Pick a pod for a request, then report the request's outcome, so that the router knows the pod's load:

    with PickerClient("127.0.0.1:9002") as picker, picker.pick("my-model", messages=messages) as pick:
        for chunk in stream_from(f"http://{pick.address}"):
            pick.first_token()  # further calls have no effect
        pick.done()
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import grpc

from router._pb import endpoint_picker_pb2 as pb

_log = logging.getLogger(__name__)

_OUTCOME = pb.ReportOutcomeRequest
_SERVICE = pb.DESCRIPTOR.services_by_name["EndpointPicker"].full_name


class PickError(Exception):
    """Pick that returned no pod.

    Attributes:
        code: NOT_FOUND: no pod serves the model; INVALID_ARGUMENT: the request is invalid;
            RESOURCE_EXHAUSTED: the request was shed; UNAVAILABLE: no pod is ready, or the router cannot be
            reached; DEADLINE_EXCEEDED: the call timed out.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class PickerClient:
    """Client of one router. Thread-safe.

    Args:
        target: "host:port" of the router's gRPC port.
        credentials: TLS credentials, for example `grpc.ssl_channel_credentials(ca_pem)`; None for plaintext.
        timeout_s: Timeout of each call in seconds.
        channel_options: Additional options of the gRPC channel.
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
        # Without types in grpcio.
        unary: Any = self._channel.unary_unary
        self._pick = unary(
            f"/{_SERVICE}/PickEndpoint",
            pb.PickEndpointRequest.SerializeToString,
            pb.PickEndpointResponse.FromString,
        )
        self._report = unary(
            f"/{_SERVICE}/ReportOutcome",
            pb.ReportOutcomeRequest.SerializeToString,
            pb.ReportOutcomeResponse.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; idempotent."""
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
        """Pick a pod for a request.

        Args:
            model: Name of a base model or LoRA adapter.
            messages: OpenAI chat messages. Give at most one of `messages`, `prompt` and `token_ids`; without
                any, the pick is by load alone.
            prompt: Text of a completion.
            token_ids: Token ids of a completion.
            tools: OpenAI tools of a chat.
            chat_options: Options of a chat: chat_template_kwargs, add_generation_prompt,
                continue_final_message, add_special_tokens.
            request_id: Id of the request; generated if empty.
            headers: HTTP headers of the request, names in lower case.
            candidates: "ip:port" of the pods that may be picked; empty for all.
            cache_salt: Salt that separates the request's cache entries from others'.

        Raises:
            PickError: No pod can be used.
            ValueError: More than one input is given.
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
            answer = self._pick(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise PickError(error.code(), error.details() or str(error.code())) from error
        return Pick(self, answer)

    def report(self, request: pb.ReportOutcomeRequest) -> bool | None:
        """Report the outcome of a request. Never raises for an unreachable router.

        Returns:
            Whether the router knows the request; None if the report failed.
        """
        try:
            return bool(self._report(request, timeout=self._timeout_s).known)
        except grpc.RpcError as error:
            _log.warning("reporting outcome failed: request=%s error=%s", request.request_id, error.details())
            return None


class Pick:
    """Picked pod, with methods to report the request's outcome.

    As a context manager it reports the end on exit, unless done() or failed() was called: done, or failed
    after an exception. Each outcome is reported once.

    Attributes:
        endpoints: Candidates, best first, never empty, with the fields of RankedEndpoint in
            endpoint_picker.proto.
        reason: Explanation of the pick in one sentence.
        degraded: Why the pick ignored the caches; empty if it used them.
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
        """Picked pod, as "ip:port"."""
        return self.endpoints[0].address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_error: object) -> None:
        if error_type is None:
            self.done()
        else:
            self.failed()

    def first_token(self) -> None:
        self._report(_OUTCOME.OUTCOME_FIRST_TOKEN)

    def done(self, *, cached_tokens: int | None = None) -> None:
        """Report that the response is complete.

        Args:
            cached_tokens: usage.prompt_tokens_details.cached_tokens, if the engine reported it.
        """
        self._report(_OUTCOME.OUTCOME_DONE, cached_tokens)

    def failed(self) -> None:
        self._report(_OUTCOME.OUTCOME_FAILED)

    def _report(self, outcome: pb.ReportOutcomeRequest.Outcome, cached_tokens: int | None = None) -> None:
        # Report each outcome once, and none after the end.
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
