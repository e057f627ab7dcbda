"""Disaggregated serving: which pod a request is charged to, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import yaml

from router.config.picker_file import parse_config
from router.feedback.change_log import ChangeLog
from router.picking.scheduler import Scheduler
from router.plugins.build import build_pipeline
from router.pods.load_table import PodWork
from router.pods.pod_set import ROLE_LABEL
from tests.support.router import replicas as replica_support
from tests.support.router.bench import Bench, completion, ended, entry, long_text, ready_pod

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
DISAGGREGATED: dict[str, Any] = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [
        {"type": "always-disagg-pd-decider"},
        {
            "type": "disagg-profile-handler",
            "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}},
        },
        {"type": "prefill-filter"},
        {"type": "decode-filter"},
    ],
    "schedulingProfiles": [
        {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}]},
        {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}]},
    ],
}


def disaggregated() -> Bench:
    """Return a router with a prefill pod A and a decode pod B."""
    config = parse_config(yaml.safe_dump(DISAGGREGATED), "c.yaml")
    roles = {A: "prefill", B: "decode"}
    pods = [replace(ready_pod(pod), entry=entry(pod, **{ROLE_LABEL: role})) for pod, role in roles.items()]
    made = Bench().with_pods(*pods)
    made.core.scheduler = Scheduler(
        made.pods.load_table,
        made.ledger,
        np.random.default_rng(3),
        block_tokens=16,
        ranker=build_pipeline(config, block_tokens=16, random=np.random.default_rng(3)),
    )
    return made


def test_the_prefill_pod_is_charged_until_the_prefill_ends() -> None:
    """The prefill pod is charged its uncached tokens; the decode pod once the prefill has ended."""
    made, text = disaggregated(), long_text(100)
    prompt = made.keys(text)
    made.index.hold(A, prompt[:10])
    decision = made.router.route(completion("r", text), 0.0)
    assert (decision.primary.pod, decision.prefill_pod) == (B, A)
    tokens = decision.prompt_tokens - 160
    assert made.ledger.load_table.work(A) == PodWork(awaiting=1, awaiting_tokens=tokens, held_tokens=tokens)
    assert made.ledger.load_table.work(B) == PodWork()
    made.lifecycle.stored(B, prompt, 1.0)
    assert made.ledger.load_table.work(A).awaiting == 1
    made.lifecycle.stored(A, prompt, 1.0)
    assert made.ledger.load_table.work(A) == PodWork()
    assert made.ledger.load_table.work(B) == PodWork(decoding=1, held_tokens=tokens)
    ended(made.lifecycle, "r", "response", 2.0, pod=B, cached_tokens=decision.prompt_tokens)
    assert (made.ledger.load_table.work(B), len(made.ledger)) == (PodWork(), 0)
    assert made.sample("kvroute_router_compared_predicted_cached_tokens_total") == 0.0
    shown = made.decision_log.find("r")
    assert shown is not None
    assert (shown["pod"], shown["prefill_pod"]) == (B, A)


def test_a_first_token_ends_the_prefill_without_stored_events() -> None:
    """A first token or an end at the destination ends the prefill on the prefill pod."""
    made = disaggregated()
    for request_id, event in (("first", "token"), ("ends", "end")):
        made.router.route(completion(request_id, long_text(50, seed=len(event))), 0.0)
        assert made.ledger.load_table.work(A).awaiting == 1
        if event == "token":
            assert made.lifecycle.first_token(request_id, "response", 1.0, pod=B)
            assert (made.ledger.load_table.work(A).awaiting, made.ledger.load_table.work(B).decoding) == (
                0,
                1,
            )
        ended(made.lifecycle, request_id, "response", 2.0, pod=B)
        assert (made.ledger.load_table.work(A), made.ledger.load_table.work(B)) == (PodWork(), PodWork())


def test_an_idle_decode_engine_does_not_end_a_request_in_prefill() -> None:
    """An idle report of the decode engine ends neither a request in prefill nor one that just arrived."""
    made = disaggregated()
    made.router.route(completion("r", long_text(50)), 0.0)
    made.lifecycle.end_lost(B, 0, 10.0, 10.0)
    assert "r" in made.ledger
    made.lifecycle.first_token("r", "response", 20.0, pod=B)
    made.lifecycle.end_lost(B, 0, 21.0, 21.0)
    assert "r" in made.ledger
    made.lifecycle.end_lost(B, 0, 30.0, 30.0)
    assert "r" not in made.ledger


def test_all_keys_of_a_disaggregated_request_are_sent_to_other_routers() -> None:
    """All keys are sent with a disaggregated request, because the decoding pod may lack blocks."""
    made, text = disaggregated(), long_text(100)
    change_log = ChangeLog(made.ledger, lambda: 0.0)
    queue = change_log.subscribe()
    prompt = made.keys(text)
    made.index.hold(A, prompt[:10])
    made.router.route(completion("r", text), 0.0)
    ((sent,),) = [changes.sent for changes in replica_support.received(change_log, queue)]
    assert (sent.pod, sent.prefill_pod, sent.keys.tolist()) == (B, A, prompt.tolist())
