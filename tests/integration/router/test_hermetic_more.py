"""Further streams in the style of the reference's hermetic cases, for rules that the cases leave out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from tests.support.router.doors import Stream, set_headers, streamed_bytes
from tests.support.router.hermetic import HERMETIC, Scene, message, pod, scene

DESTINATION = "x-gateway-destination-endpoint"
REASON = "x-llm-d-request-dropped-reason"
HEAD: dict[str, Any] = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
BODY = '{"model":"m","prompt":"p"}'


def asked(
    path: str = "/v1/completions", body: str | bytes = BODY, headers: dict[str, str] | None = None
) -> list[pb.ProcessingRequest]:
    """Return a request's messages."""
    named = {":path": path, "x-request-id": "r", **(headers or {})}
    whole = message({"type": "request_body", "end_of_stream": True, "body": ""})
    whole.request_body.body = body if isinstance(body, bytes) else body.encode()
    return [message({"type": "request_headers", "headers": named, "end_of_stream": False}), whole]


def answered(*chunks: str, content_type: str = "application/json") -> list[pb.ProcessingRequest]:
    """Return a response's messages; the last chunk ends it."""
    headers = {"content-type": content_type, "status": "200"}
    return [
        message({"type": "response_headers", "headers": headers, "end_of_stream": False}),
        *(
            message({"type": "response_body", "body": chunk, "end_of_stream": at == len(chunks)})
            for at, chunk in enumerate(chunks, 1)
        ),
    ]


class Played(Scene):
    """Shorthand for requests to a running scene."""

    def exchange(self, messages: Sequence[pb.ProcessingRequest]) -> list[pb.ProcessingResponse]:
        """Send one whole stream and return its responses."""
        with grpc.insecure_channel(f"127.0.0.1:{self.router.ports['grpc']}") as channel:
            return list(pb_grpc.ExternalProcessorStub(channel).Process(iter(messages), timeout=300))

    def refusal(self, messages: Sequence[pb.ProcessingRequest]) -> tuple[int, str, str | None]:
        """Return status, body and reason of the only response to a stream."""
        (answer,) = self.exchange(messages)
        refused = answer.immediate_response
        return refused.status.code, refused.body.decode(), set_headers(answer).get(REASON)


@contextmanager
def played(
    directory: Path, pods: Sequence[dict[str, Any]], config: dict[str, Any] | str = "default", **case: Any
) -> Iterator[Played]:
    """Run a scene."""
    named = config if isinstance(config, str) else HEAD | config
    flags = case.pop("flags", ())
    with scene({"config": named, "pods": list(pods), **case}, directory, *flags) as made:
        yield Played(made.router, made.pods)


def rewrite(name: str, *targets: tuple[str, int | None], match: str | None = None) -> dict[str, Any]:
    """Return an InferenceModelRewrite of one rule."""
    rule = {
        "matches": [{"model": {"value": match}}] if match else [],
        "targets": [
            {"modelRewrite": target} | ({"weight": weight} if weight else {}) for target, weight in targets
        ],
    }
    return {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:0{len(name) % 10}Z"},
        "spec": {"rules": [rule]},
    }


def sent_model(answers: Sequence[pb.ProcessingResponse]) -> str:
    """Return the model of the body sent to the pod, and check the body's content-length."""
    data, _ = streamed_bytes([one for one in answers if one.WhichOneof("response") == "request_body"])
    assert set_headers(answers[0])["Content-Length"] == str(len(data))
    model: str = json.loads(data)["model"]
    return model


def test_a_stream_that_was_asked_for_is_echoed_chunk_by_chunk(tmp_path: Path) -> None:
    """A response to a request with `stream: true` is passed on by chunk, whatever its content type."""
    with (
        played(tmp_path, [pod(0)]) as one,
        grpc.insecure_channel(f"127.0.0.1:{one.router.ports['grpc']}") as channel,
    ):
        for stream_flag in (True, False):
            body = json.dumps({"model": "m", "prompt": "p", "stream": stream_flag})
            stream = Stream(pb_grpc.ExternalProcessorStub(channel))
            start, first, last = answered("ab", "cd")
            stream.send(*asked(body=body), start, first)
            kinds = [stream.receive().WhichOneof("response") for _ in range(3)]
            assert kinds == ["request_headers", "request_body", "response_headers"]
            if stream_flag:
                assert streamed_bytes([stream.receive()], "response_body") == (b"ab", [False])
            stream.send(last)
            rest = stream.rest()
            expected = (b"cd", [True]) if stream_flag else (b"abcd", [True])
            assert streamed_bytes(rest, "response_body") == expected


def test_a_grpc_stream_is_echoed_message_by_message(tmp_path: Path) -> None:
    """A gRPC stream request is recognized by its field 5, and trailers end its response."""
    generate = "/vllm.grpc.engine.VllmEngine/Generate"
    with played(tmp_path, [pod(0)], "vllmgrpc") as one:
        body = b"\0\0\0\0\x05\x1a\x01x\x28\x01"
        response = answered("ab", "cd", content_type="application/grpc")
        response[-1].response_body.end_of_stream = False
        trailers = message({"type": "response_trailers"})
        answers = one.exchange([*asked(generate, body), *response, trailers])
        kinds = [answer.WhichOneof("response") for answer in answers]
        assert kinds[2:] == ["response_headers", "response_body", "response_body", "response_trailers"]
        assert streamed_bytes(answers[3:5], "response_body") == (b"abcd", [False, False])


def test_methods_and_paths_that_are_not_parsed_are_routed_by_load(tmp_path: Path) -> None:
    """Methods and paths without a parser are routed by load, with the bytes unchanged."""
    pods = [pod(0, waiting=9, usage=0.9), pod(1)]
    all_parsers = {
        "plugins": [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [{"pluginRef": "queue-scorer"}, {"pluginRef": "kv-cache-utilization-scorer"}],
            }
        ],
    }
    for config, path in (
        (all_parsers, "/v1/messages/count_tokens"),
        (all_parsers, "/anything/else"),
        ("vllmgrpc", "/vllm.grpc.engine.VllmEngine/Abort"),
    ):
        with played(tmp_path, pods, config) as two:
            answers = two.exchange(asked(path, b"\x00not read\xff"))
            assert set_headers(answers[0])[DESTINATION] == two.pods[1].address
            assert streamed_bytes(answers[1:]) == (b"\x00not read\xff", [True])


def test_a_response_to_an_unparsed_request_is_passed_on(tmp_path: Path) -> None:
    """The response to an unparsed request is passed on like any other."""
    config = {"plugins": [{"type": "queue-scorer"}]}
    with played(tmp_path, [pod(0)], config) as one:
        sent = [*asked("/v1/messages/count_tokens", "{}"), *answered("{}")]
        assert len(one.exchange(sent)) == 4


def test_trailers_and_repeated_ends_get_no_answer(tmp_path: Path) -> None:
    """Trailers and a repeated end of stream get no second pick and no second body."""
    with played(tmp_path, [pod(0)]) as one:
        start, whole = asked()
        pieces = [
            message({"type": "request_body", "body": letter, "end_of_stream": False}) for letter in BODY
        ]
        end = message({"type": "request_body", "body": "", "end_of_stream": True})
        trailers = message({"type": "request_trailers"})
        answers = one.exchange([start, *pieces, end, end, trailers])
        assert [answer.WhichOneof("response") for answer in answers] == ["request_headers", "request_body"]
        assert streamed_bytes(answers[1:]) == (whole.request_body.body, [True])


def test_rewrites_by_weight_and_by_header(tmp_path: Path) -> None:
    """An exact rule beats the header, the header beats the body; weights decide between targets."""
    resources = [
        rewrite("split", ("left", 70), ("right", 30), match="public"),
        rewrite("half", ("weighed", 1), ("unweighed", None), match="mixed"),
    ]
    with played(tmp_path, [pod(0)], resources=resources) as one:

        def model(body_model: str | None, **headers: str) -> str:
            body = json.dumps({"prompt": "p"} | ({"model": body_model} if body_model else {}))
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return sent_model(one.exchange(asked(body=body, headers=named)))

        assert {model("public") for _ in range(40)} == {"left", "right"}
        assert {model("mixed") for _ in range(10)} == {"weighed"}
        assert model("public", x_llm_d_model_name_rewrite="other") in ("left", "right")
        assert model("m", x_llm_d_model_name_rewrite="new", x_gateway_model_name_rewrite="old") == "new"
        assert model("m", x_gateway_model_name_rewrite="old") == "old"
        assert model(None, x_gateway_model_name_rewrite="old") == "old"
        assert model("model-to-be-rewritten") == "rewritten-model"


def test_a_rule_for_all_models_gives_one_to_a_request_without(tmp_path: Path) -> None:
    """A rule for all models gives one to a request without; the response keeps the pod's model name."""
    with played(tmp_path, [pod(0)], resources=[rewrite("all", ("target", None))]) as one:
        answers = one.exchange([*asked(body='{"prompt":"p"}'), *answered('{"model":"target"}')])
        assert sent_model(answers) == "target"
        assert streamed_bytes(answers[3:], "response_body")[0] == b'{"model":"target"}'


def test_sheddable_requests_get_429_while_pods_are_saturated(tmp_path: Path) -> None:
    """Requests below priority 0 get 429 while pods are saturated; unknown objectives have priority 0."""
    low = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": "low"},
        "spec": {"priority": -1, "poolRef": {"name": "pool"}},
    }
    with played(tmp_path, [pod(0, waiting=9), pod(1, waiting=6)], resources=[low]) as full:
        shed = asked(headers={"x-gateway-inference-objective": "low"})
        text = "inference error: ResourceExhausted - system saturated, sheddable request dropped"
        assert full.refusal(shed) == (429, text, "rejected-saturated")
        both = {"x-llm-d-inference-objective": "my-model", "x-gateway-inference-objective": "low"}
        for headers in (both, {"x-llm-d-inference-objective": "unknown"}, {}):
            assert DESTINATION in set_headers(full.exchange(asked(headers=headers))[0])
    with played(tmp_path, [pod(0, waiting=0)], resources=[low]) as free:
        assert DESTINATION in set_headers(free.exchange(shed)[0])


@pytest.mark.parametrize(
    ("hint", "status"),
    [([], 503), (["10.9.9.9:8000"], 503), (["", "x"], 503), (None, 200)],
)
def test_a_subset_without_pods_gets_503(tmp_path: Path, hint: list[str] | None, status: int) -> None:
    """An empty subset allows no pod, a missing one all; the filter can be disabled."""
    start, whole = asked()
    if hint is not None:
        namespace = whole.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        namespace.update({"x-gateway-destination-endpoint-subset": hint})
    with played(tmp_path, [pod(0)]) as one:
        if status == 200:
            assert DESTINATION in set_headers(one.exchange([start, whole])[0])
        else:
            text = "failed to find endpoint candidates for serving the request"
            body = f"inference error: ServiceUnavailable - {text}"
            assert one.refusal([start, whole]) == (status, body, "rejected-no-endpoints")
    with played(tmp_path, [pod(0)], flags=["--disable-endpoint-subset-filter"]) as one:
        assert DESTINATION in set_headers(one.exchange([start, whole])[0])


def test_filters_that_exclude_all_pods_get_429(tmp_path: Path) -> None:
    """If filters exclude all pods the client gets 429 with the reference's text and reason."""
    config = {
        "plugins": [{"type": "label-selector-filter", "parameters": {"matchLabels": {"gpu": "yes"}}}],
    }
    with played(tmp_path, [pod(0, gpu="no"), pod(1)], config) as none:
        text = "inference error: ResourceExhausted - no endpoints available for the given request"
        assert none.refusal(asked()) == (429, text, "rejected-saturated")


def test_fallbacks_follow_the_pick_in_header_and_metadata(tmp_path: Path) -> None:
    """A picker of two endpoints sets both, best first; scores list every scored endpoint."""
    config = {
        "plugins": [
            {"type": "queue-scorer"},
            {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 2}},
        ]
    }
    pods = [pod(0, waiting=8), pod(1, waiting=1), pod(2, waiting=4)]
    with played(tmp_path, pods, config, flags=["--emit-endpoint-scores"]) as three:
        headers, *_ = three.exchange(asked())
        addresses = [one.address for one in three.pods]
        expected = f"{addresses[1]},{addresses[2]}"
        assert set_headers(headers)[DESTINATION] == expected
        told = headers.dynamic_metadata["envoy.lb"]
        assert told[DESTINATION] == expected
        assert dict(told["x-gateway-destination-endpoint-scores"]) == {
            addresses[0]: 0.0,
            addresses[1]: 1.0,
            addresses[2]: pytest.approx(4 / 7),
        }


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", "", "error unmarshaling request bodyMap: unexpected end of JSON input"),
        ("/v1/chat/completions", "[]", None),
        (
            "/v1/chat/completions",
            '{"model":"m"}',
            "invalid chat completions request: must have valid messages",
        ),
        ("/v1/completions", '{"model":"m"}', "invalid completions request: must have prompt field"),
        ("/v1/conversations", '{"model":"m"}', "invalid conversations request: must have items field"),
        (
            "/v1/chat/completions",
            '{"messages":[{"role":"user","content":"x"}]}',
            "model not found in request body",
        ),
        ("/unknown", "{}", "no parser registered matching path suffix for: /unknown"),
    ],
)
def test_a_bad_body_is_400(tmp_path: Path, path: str, body: str, text: str | None) -> None:
    """An invalid body gets 400 in the reference's wording, even without pods."""
    with played(tmp_path, []) as none:
        status, told, reason = none.refusal(asked(path, body))
        assert (status, reason) == (400, None)
        assert told.startswith(f"inference error: BadRequest - {text or ''}")


def test_only_the_clients_name_is_seen_in_events(tmp_path: Path) -> None:
    """Every event of a stream has the client's model name."""
    headers = {"x-llm-d-model-name-rewrite": "inner"}
    events = ['data: {"model":"inner","n":1}\n\n', 'data: {"model": "inner"}\n\n', "data: [DONE]\n\n"]
    with played(tmp_path, [pod(0)]) as one:
        sent = [*asked(headers=headers), *answered(*events, content_type="text/event-stream")]
        answers = one.exchange(sent)
        data, ends = streamed_bytes(answers[3:], "response_body")
        assert data == "".join(events).replace("inner", "m").encode()
        assert ends == [False, False, True]


def test_the_conformance_headers_select_and_report_endpoints(tmp_path: Path) -> None:
    """The conformance tests' header selects endpoints in order; the response names the used one."""
    config = {
        "plugins": [{"type": "header-based-testing-filter"}, {"type": "destination-endpoint-served-verifier"}]
    }
    with played(tmp_path, [pod(0), pod(1)], config) as two:
        chosen = two.pods[1].address
        start, *rest = answered("{}")
        start.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": chosen})
        answers = two.exchange([*asked(headers={"test-epp-endpoint-selection": chosen}), start, *rest])
        assert set_headers(answers[0])[DESTINATION] == chosen
        assert set_headers(answers[2])["x-conformance-test-served-endpoint"] == chosen


def test_a_response_without_its_request_is_answered(tmp_path: Path) -> None:
    """A response without a request phase is passed on."""
    with played(tmp_path, [pod(0)]) as one:
        answers = one.exchange(answered("{", "}"))
        kinds = [answer.WhichOneof("response") for answer in answers]
        assert kinds == ["response_headers", "response_body"]
        assert streamed_bytes(answers[1:], "response_body") == (b"{}", [True])


def test_every_configuration_of_the_cases_serves_a_get(tmp_path: Path) -> None:
    """In every configuration a GET gets a pod and no header but a request id."""
    for name in HERMETIC["configs"]:
        with played(tmp_path, [pod(0), pod(1)], name) as two:
            headers = {":path": "/v1/models", "x-request-id": "r", "hi": "mom"}
            (answer,) = two.exchange(
                [message({"type": "request_headers", "headers": headers, "end_of_stream": True})]
            )
            told = set_headers(answer)
            assert told.pop(DESTINATION) in [one.address for one in two.pods]
            assert "hi" not in told
            assert "Content-Length" not in told
