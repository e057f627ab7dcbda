"""Facts of the reference picker's unit tests: parsing, rewrites, chunks, errors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config.picker_file import RewriteRule, RewriteRules, read_resources
from router.doors.boundary import BodyGuard
from router.doors.ext_proc_dialects import LlmdDialect, passed_headers, replace_model, streamed_body_responses
from router.doors.ext_proc_response import restore_client_model
from router.errors import (
    ConfigError,
    NoEndpointError,
    RequestError,
    SaturatedError,
)
from router.picking.flow import REJECTIONS
from router.picking.flow_queue import UtilizationDetector
from router.picking.route import Admission
from router.pods.load_table import PodLoadTable
from router.prompts.parsers import Parsers
from router.prompts.request import RequestKind, RouteRequest
from tests.support.router.bench import Bench
from tests.support.router.doors import set_headers
from tests.support.router.hermetic import HERMETIC

FACTS = HERMETIC["unit_cases"]
BENCH = Bench()
DIALECT = LlmdDialect(
    router=BENCH.router,
    guard=BodyGuard(),
    metrics=BENCH.metrics,
    pods=BENCH.pods,
    rewrites=RewriteRules([], np.random.default_rng()),
)


def parsed(path: str, body: object, *parsers: str) -> RouteRequest:
    """Parse a request with the given parsers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Parsers(parsers).parse("r", path, data)[0]


def framed(*fields: tuple[int, bytes]) -> bytes:
    """Build a gRPC message of length-delimited fields."""
    message = b"".join(bytes([number << 3 | 2, len(value)]) + value for number, value in fields)
    return b"\0" + len(message).to_bytes(4, "big") + message


def vertex(body: object) -> bytes:
    """Build a Vertex AI request that carries JSON."""
    carried = framed((1, b"application/json"), (2, json.dumps(body).encode()))[5:]
    return framed((1, b"projects/p"), (2, carried))


@pytest.mark.parametrize("case", FACTS["rewrite_model_name"]["cases"], ids=lambda case: case["body"][:30])
def test_the_models_name_is_restored(case: dict[str, Any]) -> None:
    """Every exact occurrence of the model's name is replaced; with empty names nothing is."""
    body = case["body"].encode()
    assert restore_client_model(body, case["target"], case["incoming"]) == case["want"].encode()


@pytest.mark.parametrize("case", FACTS["body_chunking"]["cases"], ids=lambda case: str(case["len"]))
def test_bodies_are_split_as_by_the_reference(case: dict[str, Any]) -> None:
    """Bodies are split into messages of 62,000 bytes, of which only the last ends the stream."""
    chunks = [
        answer.request_body.response.body_mutation.streamed_response
        for answer in streamed_body_responses("request_body", b"x" * case["len"], end_of_stream=True)
    ]
    assert len(chunks) == case["messages"]
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(len(chunk.body) for chunk in chunks) == case["len"]


def test_paths_find_their_parsers() -> None:
    """The longest path suffix of whole segments selects the parser, in any order; a fallback comes last."""
    names = ["openai-parser", "anthropic-parser", "vertexai-parser"]
    for path, expected in FACTS["parser_path_resolution"]["cases"]:
        own = next((name for name in names if expected and name.startswith(expected)), None)
        wanted = Parsers([own]).find(path) if own else None
        for order in (names, names[::-1]):
            assert Parsers(order).find(path) is wanted
            assert Parsers(order).find(f"{path}?x=/v1/messages") is wanted
    after_all = Parsers(["sglanghttp-parser", "passthrough-parser", "openai-parser"])
    rest = after_all.find("/any")
    assert rest is not None
    assert after_all.find("/v1/completions") is after_all.find("/regenerate") is rest
    assert after_all.find("/generate") is not rest
    assert Parsers(["sglanghttp-parser", "vllmhttp-parser"]).find("/inference/v1/generate") is not (
        after_all.find("/generate")
    )


@pytest.mark.parametrize(
    ("path", "body", "parsers", "kind", "prompt"),
    [
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}, (), RequestKind.COMPLETIONS, ["a", "b"]),
        ("/inference/v1/generate", {"model": "m", "token_ids": [1, 2]}, (), RequestKind.COMPLETIONS, [1, 2]),
        ("/generate", {"text": "x"}, ("sglanghttp-parser",), RequestKind.COMPLETIONS, "x"),
        ("/generate", {"input_ids": [3], "text": "x"}, ("sglanghttp-parser",), RequestKind.COMPLETIONS, [3]),
        ("/v1/messages", {"model": "m", "messages": [{}]}, (), RequestKind.MESSAGES, None),
        ("/v1/messages/count_tokens", {"messages": 1}, (), RequestKind.PASSTHROUGH, None),
        ("/v1/responses", {"model": "m", "input": "x"}, (), RequestKind.RESPONSES, None),
        ("/vllm.grpc.engine.VllmEngine/Abort", b"", ("vllmgrpc-parser",), RequestKind.PASSTHROUGH, None),
        (
            "/google.cloud.aiplatform.v1.PredictionService/ChatCompletions",
            vertex({"messages": [{"role": "user", "content": "x"}]}),
            ("vertexai-parser",),
            RequestKind.CHAT,
            None,
        ),
        (
            "/google.cloud.aiplatform.v1beta1.PredictionService/StreamRawPredict",
            vertex({"input": "x"}),
            ("vertexai-parser",),
            RequestKind.RESPONSES,
            None,
        ),
        ("/x.PredictionService/Explain", b"", ("vertexai-parser",), RequestKind.PASSTHROUGH, None),
        ("/anything", b"\x00", (), RequestKind.PASSTHROUGH, None),
        (
            "/vllm.grpc.engine.VllmEngine/Generate",
            b"\0\0\0\0\x06\x12\x04\x12\x02\x07\x09",
            ("vllmgrpc-parser",),
            RequestKind.COMPLETIONS,
            [7, 9],
        ),
    ],
)
def test_every_api_gives_its_prompt(
    path: str, body: object, parsers: tuple[str, ...], kind: RequestKind, prompt: object
) -> None:
    """Each API's prompt is passed on if a tokenizer can use it; other requests go by load."""
    request = parsed(path, body, *parsers)
    assert (request.kind, request.body.get("prompt")) == (kind, prompt)


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": []}, "must have valid messages field"),
        ("/v1/chat/completions", {"model": "m", "messages": "hi"}, "must have valid messages field"),
        ("/v1/chat/completions", {"model": "m", "messages": ["hi"]}, "must have valid messages field"),
        ("/v1/completions", {"model": "m", "prompt": ""}, "must have prompt field"),
        ("/v1/completions", b"{", "error unmarshaling request bodyMap: unexpected end of JSON input$"),
        ("/v1/completions", b"", "error unmarshaling request bodyMap: unexpected end of JSON input$"),
        ("/v1/completions", b"  ", "unexpected end of JSON input$"),
        ("/v1/completions", b"not json", r"invalid character 'o' in literal null \(expecting 'u'\)$"),
        ("/v1/completions", b"hello", "invalid character 'h' looking for beginning of value$"),
        ("/v1/completions", b"<html>", "invalid character '<' looking for beginning of value$"),
        ("/v1/completions", b"'a'", r"invalid character '\\'' looking for beginning of value$"),
        (
            "/v1/completions",
            b"[1]",
            r"cannot unmarshal array into Go value of type map\[string\]interface {}$",
        ),
        ("/v1/completions", b'"x"', "json: cannot unmarshal string into Go value"),
        ("/v1/completions", b"-1", "json: cannot unmarshal number into Go value"),
        ("/v1/completions", b"true", "json: cannot unmarshal bool into Go value"),
        ("/v1/completions", b"[" * 100_000, "error unmarshaling"),
        ("/v1/messages", b"", "error unmarshaling request body: unexpected end of JSON input$"),
        ("/v1/messages", {"messages": []}, "invalid messages request: must have at least one message$"),
        ("/v1/conversations", {"items": []}, "invalid conversations request: must have items field$"),
        ("/v1/responses", {"input": None}, "invalid responses request: must have input field$"),
        ("/v1/embeddings", {"input": ""}, "invalid embeddings request: must have input field$"),
        (
            "/inference/v1/generate",
            {"token_ids": []},
            "^invalid generate request: must have non-empty token_ids field$",
        ),
    ],
)
def test_a_body_without_its_field_is_refused(path: str, body: object, complaint: str) -> None:
    """A body without its required field is rejected with 400 in the reference's wording."""
    with pytest.raises(RequestError, match=complaint) as caught:
        parsed(path, body)
    assert caught.value.status == 400


@given(st.binary(max_size=60))
def test_any_grpc_body_is_read_or_refused(message: bytes) -> None:
    """Any gRPC body, framed correctly or not, is parsed or rejected."""
    for body in (message, b"\0" + len(message).to_bytes(4, "big") + message):
        with contextlib.suppress(RequestError):
            parsed("/vllm.grpc.engine.VllmEngine/Embed", body, "vllmgrpc-parser")


def test_sglangs_parser_asks_for_ids_in_its_own_words() -> None:
    """SGLang's parser accepts text too, and rejects other bodies in the reference's wording."""
    with pytest.raises(RequestError, match=r"^invalid generate request: input_ids must be provided$"):
        parsed("/generate", {"sampling_params": {}}, "sglanghttp-parser")
    request = parsed("/generate", {"input_ids": [1], "extra_key": "mine"}, "sglanghttp-parser")
    assert request.cache_salt == "mine"


@pytest.mark.parametrize("value", ["", 7, None])
def test_an_empty_model_or_salt_is_none(value: object) -> None:
    """Empty or non-text values are neither a model nor a cache salt."""
    request = parsed("/v1/completions", {"model": value, "cache_salt": value, "prompt": "x"})
    assert (request.model, request.cache_salt) == (None, None)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_vertex_body_is_read_or_refused(message: bytes) -> None:
    """Any Vertex AI body, framed correctly or not, is parsed or rejected."""
    for body in (message, framed((2, message)), framed((2, framed((2, message))[5:]))):
        with contextlib.suppress(RequestError):
            parsed("/x.PredictionService/RawPredict", body, "vertexai-parser")


def test_unknown_paths_need_the_passthrough_parser() -> None:
    """Unknown paths are rejected in the reference's wording unless the passthrough parser is configured."""
    with pytest.raises(RequestError, match=r"^no parser registered matching path suffix for: /unknown$"):
        parsed("/unknown", {}, "openai-parser")


def test_an_error_quotes_only_the_beginning_of_a_path() -> None:
    """An error quotes only the beginning of a long path."""
    with pytest.raises(RequestError, match=r"for: /x{255}$"):
        parsed("/" + "x" * 100_000, {}, "openai-parser")


@pytest.mark.parametrize("case", FACTS["weighted_rewrite"]["cases"], ids=lambda case: str(case["targets"]))
def test_targets_are_drawn_by_weight(case: dict[str, Any]) -> None:
    """Rewrite targets are drawn in proportion to their weights."""
    targets = [(name, weight) for name, weight in case["targets"]]
    rules = RewriteRules([RewriteRule(frozenset(), targets)], np.random.default_rng(2))
    drawn = [rules.target("any") for _ in range(2000)]
    assert set(drawn) == set(case["possible"])
    total = sum(weight or 0 for _, weight in targets)
    for name, weight in targets:
        if total:
            assert drawn.count(name) / 2000 == pytest.approx((weight or 0) / total, abs=0.05)


def test_rewrites_go_by_precedence(tmp_path: Path) -> None:
    """Rewrite rules apply in order: exact before generic, oldest object first, first rule first."""

    def rewrite(name: str, created: str, *rules: tuple[str, str]) -> dict[str, Any]:
        made = [
            {"matches": [{"model": {"value": match}}] if match else [], "targets": [{"modelRewrite": target}]}
            for match, target in rules
        ]
        return {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceModelRewrite",
            "metadata": {"name": name, "creationTimestamp": created},
            "spec": {"rules": made},
        }

    path = tmp_path / "resources.yaml"
    young = rewrite("young", "2026-02-01T00:00:00Z", ("m", "young"), ("", "generic"))
    old = rewrite("old", "2026-01-01T00:00:00Z", ("m", "old"), ("m", "late"))
    path.write_text(yaml.safe_dump_all([young, old]))
    rules = RewriteRules(read_resources(path).rules, np.random.default_rng())
    assert [rules.target(model) for model in ("m", "other", None)] == ["old", "generic", "generic"]
    assert RewriteRules([], np.random.default_rng()).target("m") is None
    path.write_text(yaml.safe_dump(old | {"kind": "Rewrite"}))
    with pytest.raises(ConfigError, match=r"resources\.yaml:\d+: kind: unknown value 'Rewrite'"):
        read_resources(path)


def test_a_rewritten_body_keeps_its_numbers_and_its_order() -> None:
    """A rewritten body keeps large integers, exponents and key order as the client wrote them."""
    body = b'{"z": 12345678901234567890, "model": "a", "y": 1e400, "seed": 9007199254740993}'
    sent = replace_model(body, 'b"')
    assert sent == b'{"z":12345678901234567890,"model":"b\\"","y":1e400,"seed":9007199254740993}'


@pytest.mark.parametrize(("code", "status"), FACTS["error_to_http"]["map"].items())
def test_errors_have_the_references_text(code: str, status: int) -> None:
    """An error's text has the reference's format: code and message in one line."""
    answer = DIALECT.error_response(RequestError(status, "why")).immediate_response
    assert (answer.status.code, answer.body) == (status, f"inference error: {code} - why".encode())


def test_rejections_carry_their_reasons() -> None:
    """Rejections carry the protocol's reason header: no candidates, all filtered, saturated."""
    shed = "rejected-saturated"
    for error, status, reason, text in (
        (NoEndpointError("x"), 503, "rejected-no-endpoints", "ServiceUnavailable - failed to find endpoint"),
        (RequestError(429, "x", dropped_reason=shed), 429, shed, "ResourceExhausted - x"),
        (SaturatedError("x"), 429, shed, "ResourceExhausted - system saturated, sheddable"),
    ):
        answer = DIALECT.error_response(error)
        assert answer.immediate_response.status.code == status
        assert set_headers(answer) == {"x-llm-d-request-dropped-reason": reason}
        assert answer.immediate_response.body.startswith(f"inference error: {text}".encode())


def test_flow_controls_outcomes_are_the_references() -> None:
    """Every rejection of flow control has the reference's status and reason."""
    table = {(status, reason) for _, _, status, reason in FACTS["flow_control_outcomes"]["cases"] if reason}
    ours = {(status, reason) for status, reason, _ in REJECTIONS.values()}
    assert ours == table


def test_shedding_is_the_references() -> None:
    """While pods are saturated, requests below priority 0 get 429 and others pass."""
    load_table = PodLoadTable()
    admission = Admission({"low": -1}, UtilizationDetector(), load_table)
    rows = load_table.rows(["a:1"])
    with pytest.raises(SaturatedError):
        admission.admit({"x-llm-d-inference-objective": "low"}, rows, 0.0)
    assert admission.admit({}, rows, 0.0) == 0


def test_a_clients_routing_headers_are_not_passed_on() -> None:
    """Routing headers of a client, in old and new names, are not passed on."""
    owned = [name for pair in FACTS["header_aliases"]["pairs"].items() for name in pair]
    owned += [
        "content-length",
        "x-gateway-destination-endpoint",
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
    ]
    assert passed_headers(dict.fromkeys([*owned, "hi"], "x")) == {"hi": "x"}
