"""Disaggregated prefill and decode: which pod a request is charged to, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import yaml

from router.config.picker_file import parse_config
from router.feedback.change_log import Journal
from router.picking.scheduler import Scheduler
from router.plugins.build import build_pipeline
from router.plugins.labels import ROLE_LABEL
from router.pods.load_table import PodWork
from tests.unit import replica_support
from tests.unit.router_support import Bench, completion, entry, long_text, ready_pod

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
    """Return a bench with pod A for prefill and pod B for decode."""
    config = parse_config(yaml.safe_dump(DISAGGREGATED), "c.yaml")
    roles = {A: "prefill", B: "decode"}
    pods = [replace(ready_pod(pod), entry=entry(pod, **{ROLE_LABEL: role})) for pod, role in roles.items()]
    made = Bench().with_pods(*pods)
    made.router.scheduler = Scheduler(
        made.pods.board,
        made.ledger,
        np.random.default_rng(3),
        block_tokens=16,
        ranker=build_pipeline(config, block_tokens=16, random=np.random.default_rng(3)),
    )
    return made


def test_the_prefill_pod_is_charged_with_the_prefill() -> None:
    """The prefill pod is charged with uncached tokens, then the decode pod with the request."""
    made, text = disaggregated(), long_text(100)
    prompt = made.keys(text)
    made.index.hold(A, prompt[:10])
    decision = made.router.route(completion("r", text), 0.0)
    assert (decision.primary.pod, decision.prefill_pod) == (B, A)
    tokens = decision.prompt_tokens - 160
    assert made.ledger.board.work(A) == PodWork(awaiting=1, awaiting_tokens=tokens, held_tokens=tokens)
    assert made.ledger.board.work(B) == PodWork()
    made.outcomes.stored(B, prompt, 1.0)
    assert made.ledger.board.work(A).awaiting == 1
    made.outcomes.stored(A, prompt, 1.0)
    assert made.ledger.board.work(A) == PodWork()
    assert made.ledger.board.work(B) == PodWork(decoding=1, held_tokens=tokens)
    made.outcomes.ended("r", "response", 2.0, pod=B, cached_tokens=decision.prompt_tokens)
    assert (made.ledger.board.work(B), len(made.ledger)) == (PodWork(), 0)
    assert made.sample("kvroute_router_compared_predicted_cached_tokens_total") == 0.0
    shown = made.explain.one("r")
    assert shown is not None
    assert (shown["pod"], shown["prefill_pod"]) == (B, A)


def test_an_unannounced_prefill_ends_with_the_first_token() -> None:
    """The first token or the end of a request ends its prefill on the other pod."""
    made = disaggregated()
    for request_id, told in (("first", "token"), ("ends", "end")):
        made.router.route(completion(request_id, long_text(50, seed=len(told))), 0.0)
        assert made.ledger.board.work(A).awaiting == 1
        if told == "token":
            assert made.outcomes.first_token(request_id, "response", 1.0, pod=B)
            assert (made.ledger.board.work(A).awaiting, made.ledger.board.work(B).decoding) == (0, 1)
        made.outcomes.ended(request_id, "response", 2.0, pod=B)
        assert (made.ledger.board.work(A), made.ledger.board.work(B)) == (PodWork(), PodWork())


def test_the_decode_engines_load_ends_no_remote_prefill() -> None:
    """The decode engine's reported requests end neither a remote prefill nor a very recent request."""
    made = disaggregated()
    made.router.route(completion("r", long_text(50)), 0.0)
    made.outcomes.reconcile(B, 0, 10.0, 10.0)
    assert "r" in made.ledger
    made.outcomes.first_token("r", "response", 20.0, pod=B)
    made.outcomes.reconcile(B, 0, 21.0, 21.0)
    assert "r" in made.ledger
    made.outcomes.reconcile(B, 0, 30.0, 30.0)
    assert "r" not in made.ledger


def test_other_routers_assume_all_blocks_of_shared_requests() -> None:
    """Other routers assume all blocks on both pods, because the decode pod may lack cached ones."""
    made, text = disaggregated(), long_text(100)
    journal = Journal(made.ledger, lambda: 0.0)
    reader = journal.join()
    prompt = made.keys(text)
    made.index.hold(A, prompt[:10])
    made.router.route(completion("r", text), 0.0)
    ((sent,),) = [news.sent for news in replica_support.told(journal, reader)]
    assert (sent.pod, sent.prefill_pod, sent.keys.tolist()) == (B, A, prompt.tolist())
