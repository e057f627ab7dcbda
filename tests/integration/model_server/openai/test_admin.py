"""Administration of a real model server: adapters, sleep, aborts, keys, a stuck engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, ConflictError, OpenAI

from model_server.openai import app
from tests.support.model_server.http import MODEL, RunningServer, running_server, wait_until
from tests.support.model_server.lora import save_adapter, tiny_weights

COMPLETIONS = "/v1/completions"
GREEDY: dict[str, Any] = {"prompt": "The KV cache", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server for the tests that restore its state."""
    with running_server(runtime_loras=True) as running:
        yield running


def text(server: RunningServer, **body: Any) -> str:
    """Return the text of a greedy completion."""
    answer = server.post(COMPLETIONS, {**GREEDY, **body})
    assert answer.status == 200, answer.data
    return str(answer.json()["choices"][0]["text"])


def test_an_adapter_is_a_model_of_its_own(server: RunningServer, tmp_path: Path) -> None:
    """An adapter is listed under its parent, changes answers, and is gone after unloading."""
    base = text(server)
    save_adapter(tmp_path, tiny_weights())
    body = {"lora_name": "sql", "lora_path": str(tmp_path)}
    assert server.admin("POST", "/v1/load_lora_adapter", body).status == 200
    assert server.admin("POST", "/v1/load_lora_adapter", body).status == 400
    card = server.get("/v1/models").json()["data"][-1]
    assert (card["id"], card["parent"], card["root"]) == ("sql", MODEL, str(tmp_path))
    assert text(server, model="sql") != base
    assert text(server) == base
    assert server.admin("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}).status == 200
    assert server.admin("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}).status == 404
    assert server.post(COMPLETIONS, {**GREEDY, "model": "sql"}).status == 404


def test_adapters_come_from_operators_only() -> None:
    """Without the flag, clients cannot load adapters."""
    with running_server() as closed:
        answer = closed.admin("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"})
        assert answer.status == 403
        assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_an_engine_that_slept_answers_as_before(server: RunningServer) -> None:
    """Sleep frees the cache, waking up restores service, and both are reported."""
    before = text(server)
    wait_until(server.idle)
    answer = server.admin("POST", "/sleep")
    assert (answer.status, answer.json()) == (200, {"freed_bytes": server.engine.freed_bytes})
    assert server.engine.freed_bytes > 0
    assert server.admin("GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert server.get("/health").status == 200
    assert server.admin("POST", "/wake_up").status == 200
    assert server.admin("GET", "/is_sleeping").json() == {"is_sleeping": False}
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert text(server) == before
    assert server.metric("vllm:prefix_cache_hits_total") == hits


def test_a_running_request_can_be_deleted(server: RunningServer) -> None:
    """DELETE ends a request: its blocks are freed, and its client gets an error."""
    answers: list[Any] = []
    body = {**GREEDY, "max_tokens": 8_000, "request_id": "long"}
    thread = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, body)))
    thread.start()
    wait_until(lambda: server.http.request("DELETE", f"{server.url}/v1/requests/cmpl-long").status == 200)
    thread.join()
    assert answers[0].status == 409
    wait_until(server.idle)
    assert server.http.request("DELETE", f"{server.url}/v1/requests/cmpl-long").status == 404
    assert server.get("/load").json() == {"server_load": 0}


def test_a_deleted_stream_ends_with_an_error(server: RunningServer) -> None:
    """A deleted stream raises an error in the client."""
    client = server.openai()
    extra = {"ignore_eos": True, "request_id": "stream"}
    stream = client.completions.create(
        model=MODEL, prompt="x", max_tokens=8_000, stream=True, extra_body=extra
    )
    next(iter(stream))
    assert server.http.request("DELETE", f"{server.url}/v1/requests/cmpl-stream").status == 200
    with pytest.raises(Exception, match="DELETE") as caught:
        list(stream)
    assert not isinstance(caught.value, ConflictError)  # the status was sent before
    wait_until(server.idle)


def test_the_api_key_is_asked_for() -> None:
    """Without the key only health, version, load and metrics are answered; with it, everything is."""
    with running_server(api_key="secret") as locked:
        for path in (COMPLETIONS, "/tokenize", "/nothing"):
            answer = locked.post(path, {"prompt": "x"})
            assert (answer.status, answer.json()["error"]["type"]) == (401, "AuthenticationError")
        for path in ("/health", "/ping", "/metrics", "/load", "/version"):
            assert locked.get(path).status == 200
        with pytest.raises(AuthenticationError):
            locked.openai().models.list()
        with OpenAI(base_url=f"{locked.url}/v1", api_key="secret", max_retries=0) as client:
            assert next(iter(client.models.list())).id == MODEL


ADMINISTRATION = [
    ("GET", "/kv_events/snapshot"),
    ("GET", "/kv_event_sources"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
]


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
def test_the_serving_port_has_no_administration(server: RunningServer, method: str, path: str) -> None:
    """On the serving port administration and snapshots answer 404, however the path is encoded."""
    port = server.admin_url.rsplit(":", 1)[1]
    for dressed in (path, path + "?x=1", f"/{path}", path.replace("/", "/%2e/", 1)):
        answer = server.http.request(method, server.url + dressed, headers={"host": f"127.0.0.1:{port}"})
        assert (answer.status, answer.json()["error"]["type"]) == (404, "NotFoundError")


def test_both_ports_answer_probes_and_scrapers(server: RunningServer) -> None:
    """Health, load, version and metrics, which reveal no prompts, are on both ports."""
    for path in ("/health", "/ping", "/load", "/version", "/metrics"):
        assert server.get(path).status == server.admin("GET", path).status == 200
    assert server.admin("POST", COMPLETIONS, {"prompt": "x"}).status == 404


def test_administration_asks_for_its_token() -> None:
    """Without the right token administration answers 401; probes and scrapers need none."""
    with running_server(admin_token="secret", api_key="key") as guarded:
        for secret in (None, "Bearer key", "Bearer secre", "Bearer secret2", "secret", "Basic secret"):
            headers = {} if secret is None else {"authorization": secret}
            for method, path in ADMINISTRATION:
                answer = guarded.admin(method, path, headers=headers)
                assert (answer.status, answer.json()["error"]["type"]) == (401, "AuthenticationError")
            assert guarded.admin("GET", "/metrics", headers=headers).status == 200
        headers = {"authorization": "Bearer secret"}
        assert guarded.admin("POST", "/reset_prefix_cache", headers=headers).json() == {"success": True}
        assert guarded.admin("GET", "/kv_events/snapshot", headers=headers).status == 200
        assert guarded.post(COMPLETIONS, {"prompt": "x"}, headers=headers).status == 401


def test_a_stuck_engine_is_not_healthy(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """/health fails while a step with work hangs, and recovers afterwards."""
    entered, go_on = threading.Event(), threading.Event()
    run = server.engine.executor.execute_model

    def hanging(chunks: Any) -> Any:
        entered.set()
        assert go_on.wait(300)
        return run(chunks)

    monkeypatch.setattr(app, "STUCK_S", 0.05)
    monkeypatch.setattr(server.engine.executor, "execute_model", hanging)
    thread = threading.Thread(target=lambda: text(server, max_tokens=1))
    thread.start()
    try:
        assert entered.wait(300)
        wait_until(lambda: server.get("/health").status == 503)
    finally:
        go_on.set()
        thread.join()
    monkeypatch.undo()
    wait_until(lambda: server.get("/health").status == 200)
