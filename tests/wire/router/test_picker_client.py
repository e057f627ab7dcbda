"""The Python client of PickEndpoint against the real service, in plaintext and over TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import trustme

from router.client import PickerClient, PickError
from tests.support.router.bench import TINY, TOKENIZER, Bench, long_text, ready_pod
from tests.support.router.doors import TIMEOUT_S, serving

pytestmark = pytest.mark.usefixtures("each_transport")

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
MESSAGES = [{"role": "user", "content": TEXT}]


@contextmanager
def picker(bench: Bench) -> Iterator[PickerClient]:
    """Return a client of a served bench."""
    with serving(bench) as served, PickerClient(served.address, timeout_s=TIMEOUT_S) as client:
        yield client


def ends(bench: Bench, outcome: str) -> float:
    """Return the number of requests whose end was reported."""
    return bench.sample("kvroute_router_request_ends_total", source="report", outcome=outcome)


def test_a_pick_returns_ranked_pods_and_reports_outcomes() -> None:
    """A pick returns the ranked pods as plain values, and first token and end are reported once each."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    with picker(bench) as client:
        pick = client.pick(TINY, prompt=TEXT, request_id="mine")
        assert (pick.address, pick.request_id, pick.degraded) == (B.address, "mine", "")
        assert [one.address for one in pick.endpoints] == [B.address, A.address]
        assert pick.endpoints[0].cached_tokens > 0
        assert pick.prompt_tokens == len(TOKENIZER.encode(TEXT))
        pick.first_token()
        pick.first_token()
        assert bench.ledger.load_table.work(B.address).decoding == 1
        pick.done(cached_tokens=16)
        pick.failed()
    record = bench.decision_log.find("mine")
    assert record is not None
    assert record["delivered_cached_tokens"] == 16
    assert (len(bench.ledger), ends(bench, "done"), ends(bench, "failed")) == (0, 1, 0)


def test_a_pick_as_a_context_manager_reports_the_end() -> None:
    """Used as a context manager, a pick reports done, or failed if an exception leaves the block."""
    bench = Bench().with_pods(A)
    with picker(bench) as client:
        with client.pick(TINY, messages=MESSAGES):
            assert len(bench.ledger) == 1
        with pytest.raises(ZeroDivisionError), client.pick(TINY, messages=MESSAGES):
            raise ZeroDivisionError
        with client.pick(TINY, messages=MESSAGES) as pick:
            pick.done()
    assert (len(bench.ledger), ends(bench, "done"), ends(bench, "failed")) == (0, 2, 1)


def test_every_form_of_input_is_passed_on() -> None:
    """Text, token ids and chats give the engine's number of tokens; without input the pick is by load."""
    with picker(Bench().with_pods(A, B)) as client:
        ids = TOKENIZER.encode(TEXT)
        assert client.pick(TINY, token_ids=[int(i) for i in ids]).prompt_tokens == len(ids)
        chat = client.pick(TINY, messages=MESSAGES).prompt_tokens
        bare = client.pick(TINY, messages=MESSAGES, chat_options={"add_generation_prompt": False})
        assert len(ids) < bare.prompt_tokens < chat
        narrowed = client.pick(TINY, candidates=[B.address], headers={"x-request-id": "from-header"})
        assert (narrowed.address, narrowed.degraded) == (B.address, "passthrough")
        assert narrowed.request_id == "from-header"


def test_two_inputs_are_rejected_by_the_client() -> None:
    """Two inputs in one call are rejected before anything is sent."""
    with PickerClient("127.0.0.1:1") as client, pytest.raises(ValueError, match="one of"):
        client.pick(TINY, prompt="a", token_ids=[1])


def test_errors_have_the_routers_code_and_message() -> None:
    """Unknown model, no pod, invalid option and unreachable router have different errors."""
    with picker(Bench().with_pods(A)) as client:
        with pytest.raises(PickError, match="add_generation_prompt") as unreadable:
            client.pick(TINY, messages=MESSAGES, chat_options={"modl": "x"})
        assert unreadable.value.code is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(PickError, match="gpt-9") as unknown:
            client.pick("gpt-9", prompt="hi")
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(PickError) as nobody:
            client.pick(TINY, prompt="hi", candidates=["10.9.9.9:1"])
        assert nobody.value.code is grpc.StatusCode.UNAVAILABLE


def test_an_unavailable_router_does_not_fail_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """If the router is unavailable at the end, a warning is logged and no exception is raised."""
    bench = Bench().with_pods(A)
    with serving(bench) as served:
        client = PickerClient(served.address, timeout_s=TIMEOUT_S)
        pick = client.pick(TINY, prompt=TEXT, request_id="lost")
    pick.done()
    assert "reporting outcome failed: request=lost" in caplog.text
    with pytest.raises(PickError) as gone:
        client.pick(TINY, prompt=TEXT)
    assert gone.value.code is grpc.StatusCode.UNAVAILABLE
    client.close()


def test_requests_with_one_id_are_distinguished_by_pod() -> None:
    """Of two requests with one id on different pods, a report ends the one on its own pod."""
    bench = Bench().with_pods(A, B)
    with picker(bench) as client:
        one = client.pick(TINY, prompt=TEXT, request_id="same", candidates=[A.address])
        other = client.pick(TINY, prompt=TEXT, request_id="same", candidates=[B.address])
        other.done()
        assert bench.ledger.load_table.work(A.address).awaiting == 1
        assert bench.ledger.load_table.work(B.address).awaiting == 0
        one.done()
    assert len(bench.ledger) == 0


def test_tls_and_plaintext_work() -> None:
    """A pick and its report work over TLS with the server's certificate, and in plaintext."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bench = Bench().with_pods(A)
    trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with serving(bench, tls=lambda: context) as served:
        with PickerClient(served.address, credentials=trusted, timeout_s=TIMEOUT_S) as client:
            client.pick(TINY, prompt=TEXT).done()
        with PickerClient(served.address, timeout_s=TIMEOUT_S) as plain:
            plain.pick(TINY, prompt=TEXT).done()
        stranger = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
        with (
            PickerClient(served.address, credentials=stranger, timeout_s=TIMEOUT_S) as client,
            pytest.raises(PickError),
        ):
            client.pick(TINY, prompt=TEXT)
    assert ends(bench, "done") == 2
