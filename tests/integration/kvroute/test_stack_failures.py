"""Effects on clients when a model server dies, restarts, or sends invalid events."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import urllib3
import zmq

from kvroute.demo.load import conversation, new_messages
from kvroute.envoy_config import POD_HEADER
from kvroute.stack import empty_caches
from tests.support.kvroute.stack import RunningStack, running_stack, wait_until

MODEL = "kvroute-tiny"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Provide a stack for these tests only, because they break it."""
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def stack(running: RunningStack) -> Iterator[RunningStack]:
    """Provide the stack, and restore it afterwards: all pods are up, empty and idle."""
    declared = (running.directory / "pods.yaml").read_text()
    yield running
    (running.directory / "pods.yaml").write_text(declared)
    wait_until("every process runs", lambda: _all_run(running))
    wait_until("both pods serve", lambda: running.metric("llm_d_epp_ready_endpoints") == 2)
    wait_until("the pods are idle", lambda: running.metric("llm_d_epp_request_running") == 0)
    empty_caches(running.plan)
    wait_until("the index holds no block", lambda: running.metric("kvroute_indexer_blocks") == 0)


class Load:
    """Clients that send sequential requests until they are stopped."""

    def __init__(self, stack: RunningStack, clients: int) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.served: list[str] = []
        self.refused: list[int] = []
        self.hung: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int) -> None:
        api = self._stack.openai(max_retries=0, timeout=300)
        number = client * 1000
        while not self._stop.is_set():
            number += 1
            try:
                raw = api.chat.completions.with_raw_response.create(
                    model=MODEL, messages=new_messages(number), max_tokens=4
                )
                self.served.append(raw.headers[POD_HEADER])
            except openai.APITimeoutError as error:
                self.hung.append(repr(error))
            except openai.APIStatusError as error:
                self.refused.append(error.status_code)
            except openai.APIConnectionError:
                self.refused.append(0)


def test_a_killed_pod_is_avoided_and_used_again_after_its_restart(stack: RunningStack) -> None:
    """When a pod dies under load, no request hangs, other pods serve, and the restarted pod is used."""
    victim = next(iter(stack.plan.pod_urls))
    dead = stack.child_of(victim).process
    with Load(stack, clients=4) as load:
        wait_until("both pods serve", lambda: len(set(load.served)) == 2)
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        wait_until("the router has left it", lambda: stack.metric("llm_d_epp_ready_endpoints") == 1)
        at_death, refused_at_death = len(load.served), len(load.refused)
        wait_until("the other pod serves on", lambda: len(load.served) > at_death + 20)
        assert set(load.served[at_death + 8 :]) == set(stack.plan.pod_urls) - {victim}
        assert len(load.refused) <= refused_at_death + 4
        wait_until("it is started again", lambda: _all_run(stack))
        wait_until("the restarted pod serves again", lambda: victim in load.served[at_death + 8 :])
    assert not load.hung
    assert set(load.refused) <= {0, 500, 502, 503}


def test_a_restarted_pod_has_no_predicted_blocks(stack: RunningStack) -> None:
    """After a restart, blocks of the old process are not predicted, even before any event."""
    messages = list(conversation(0, 110).turns[0])
    ask = stack.openai().chat.completions.with_raw_response
    first = ask.create(model=MODEL, messages=messages, max_tokens=4)
    pod = first.headers[POD_HEADER]
    child = stack.child_of(pod)
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    wait_until("it is started again", lambda: _all_run(stack))
    wait_until("the router uses both pods", lambda: stack.metric("llm_d_epp_ready_endpoints") == 2)
    wait_until("the index holds no block", lambda: stack.metric("kvroute_indexer_blocks") == 0)
    again = ask.create(model=MODEL, messages=messages, max_tokens=4)
    assert stack.decision(again.headers["x-request-id"])["predicted_cached_tokens"] == 0
    assert again.parse().usage.prompt_tokens_details.cached_tokens == 0


def test_without_any_pod_a_request_is_rejected_at_once(stack: RunningStack) -> None:
    """If all pods are down, the client gets 503 with an OpenAI error, and no request waits."""
    for pod in stack.plan.pod_urls:
        child = stack.child_of(pod)
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
    wait_until("the router has asked them in vain", lambda: all(map(_is_asked_in_vain, _pods(stack))))
    with pytest.raises(openai.InternalServerError) as caught:
        stack.openai(max_retries=0).completions.create(model=MODEL, prompt="Hello")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert caught.value.body is not None


def test_a_pod_that_publishes_garbage_disturbs_nobody(stack: RunningStack) -> None:
    """Invalid frames are counted and dropped, and predictions of other pods stay exact."""
    with zmq.Context() as context, context.socket(zmq.PUB) as rogue:
        rogue.linger = 0
        port = rogue.bind_to_random_port("tcp://127.0.0.1")
        path = stack.directory / "pods.yaml"
        declared = json.loads(path.read_text())
        labels = {"kvroute.io/model": MODEL, "kvroute.io/kv-events-port": str(port)}
        declared["endpoints"].append(
            {"name": "rogue", "namespace": "local", "address": "127.0.0.1", "port": "9", "labels": labels}
        )
        path.write_text(json.dumps(declared))
        subscribers = "llm_d_epp_kv_cache_events_active_subscribers"
        wait_until("the rogue is followed", lambda: stack.metric(subscribers) == 3)
        garbage = [
            [b"only one frame"],
            [b"topic", b"short", b"\xc1"],
            [b"kv@x@y", (0).to_bytes(8, "big"), os.urandom(5000)],
            [b"", (2**64 - 1).to_bytes(8, "big"), b"\x93\xcb"],
        ]

        def is_counted() -> bool:
            for frames in garbage:
                rogue.send_multipart(frames)
            page = stack.metrics_page()
            return "kvroute_indexer_rejected_total{" in page

        wait_until("garbage is counted", is_counted)
        unread_batches = stack.unread_batches()
        messages = list(conversation(0, 110).turns[0])
        for turn in range(3):
            raw = stack.openai().chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, max_tokens=20, extra_body={"ignore_eos": True}
            )
            completion = raw.parse()
            delivered = completion.usage.prompt_tokens_details.cached_tokens
            assert stack.decision(raw.headers["x-request-id"])["predicted_cached_tokens"] == delivered
            assert (delivered > 0) == (turn > 0)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
            messages.append({"role": "user", "content": f"And then, the {turn}th time?"})
            wait_until("the pods are idle", lambda: stack.metric("llm_d_epp_request_running") == 0)
            wait_until("all events are read", lambda: stack.unread_batches() <= unread_batches)


def _all_run(stack: RunningStack) -> bool:
    """Restart exited processes that are due; return whether all processes run."""
    stack.supervisor.check()
    return all(child.process.poll() is None for child in stack.supervisor.children)


def _pods(stack: RunningStack) -> list[dict[str, Any]]:
    page = urllib3.request("GET", f"{stack.plan.router_debug_url}/debug/pods", timeout=300)
    pods: list[dict[str, Any]] = page.json()["pods"]
    return pods


def _is_asked_in_vain(pod: dict[str, Any]) -> bool:
    # Before its first probe a silent pod may still get requests.
    return str(pod["why_not"]).startswith("/health: ")
