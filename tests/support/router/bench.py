"""Router without sockets: declared pods, an index that tests fill by hand, a fixed random seed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from indexer import PodMatches, PromptCauses, StreamState
from indexer.audit.mismatch_watch import DispatchKey
from indexer.index.contract import Limit, split_prompt
from indexer.keys import Keys, Tokens
from indexer.pod_entry import PodEntry
from indexer.wire.tiers import CPU_TIER, GPU_TIER, SPECULATIVE_TIER, Tiers
from router.feedback.lifecycle import Lifecycle
from router.feedback.outcomes import RequestReport, end_event
from router.inflight.dispatch import Dispatch
from router.inflight.failures import PodFailures
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import PrefillRates, RateParameters
from router.observe.decision_log import DecisionLog
from router.observe.metrics import RouterMetrics
from router.observe.requests import ObservedRouter
from router.observe.tracing import Traces
from router.picking.candidates import StatePods
from router.picking.flow_queue import UtilizationDetector
from router.picking.route import Admission, Router
from router.picking.scheduler import Scheduler
from router.plugins.pipeline import Pipeline
from router.pods.pod_set import Pod, PodSet, ServedModels
from router.prompts.request import RequestKind, RouteRequest
from router.prompts.tokenizers import TokenizerRegistry
from tokenization import TINY_DIRECTORY, PromptTokenizer

TINY = "kvroute-tiny"
TOKENIZER = PromptTokenizer.from_directory(TINY_DIRECTORY)


def entry(address: str, **labels: str) -> PodEntry:
    """Return the entry of a pod named after its port."""
    host, _, port = address.rpartition(":")
    return PodEntry(name=f"pod-{port}", namespace="test", address=host, port=int(port), labels=labels)


def ready_pod(address: str, *, model: str = TINY, adapters: Collection[str] = ()) -> Pod:
    """Return a ready pod that serves a model."""
    models = ServedModels(model, frozenset({model}), frozenset(adapters), 100_000)
    pod = Pod(address=address, name=f"pod-{address.rpartition(':')[2]}", entry=entry(address))
    return replace(pod, ready=True, why="", probed=True, models=models)


class PlainIndex:
    """In-memory substitute of KvIndexer over sets; `hold` adds blocks to a pod."""

    block_tokens = 16
    tiers = Tiers()

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.host: dict[str, set[int]] = {}
        self.speculative: dict[DispatchKey, tuple[str, set[int]]] = {}
        self.settled: list[str] = []
        self.lost: list[str] = []
        self.state = StreamState.EXACT
        self.ranks: dict[str, int] = {}  # rank that is chosen of a pod with several

    def block_keys(
        self,
        model: str,
        token_ids: Tokens,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extras: Sequence[bytes] = (),
        dry: bool = False,
    ) -> Keys:
        """Return the chained hashes of the full blocks."""
        keys, parent = [], hash((model, lora_name, cache_salt))
        for start in range(0, len(token_ids) - self.block_tokens + 1, self.block_tokens):
            extra = extras[start // self.block_tokens] if extras else b""
            parent = hash((parent, extra, *map(int, token_ids[start : start + self.block_tokens])))
            keys.append(parent)
        return np.array(keys, np.int64).view(np.uint64)

    def hold(self, pod: str, keys: Keys, *, host: bool = False) -> None:
        """Add blocks to a pod's cache."""
        (self.host if host else self.held).setdefault(pod, set()).update(keys.tolist())

    def match(
        self,
        keys: Keys,
        pods: Collection[str],
        *,
        prompt_tokens: int | None = None,
        tokens: object = None,
        pending_tokens: object = None,
        dry: bool = False,
    ) -> PodMatches:
        """Return the longest cached prefix of each pod."""
        rows = {pod: row for row, pod in enumerate(sorted(pods))}
        by_tier = np.zeros((len(rows), len(self.tiers.names)), np.int32)
        for pod, row in rows.items():
            for tier, blocks in self._prefix(keys.tolist(), pod).items():
                by_tier[row, self.tiers.number(tier)] = blocks
        blocks, states = by_tier.sum(axis=1, dtype=np.int32), dict.fromkeys(rows, self.state)
        ranks = {} if pending_tokens is None else self.ranks
        return PodMatches(
            rows, self.tiers, blocks, by_tier, ranks=ranks, states=states, followed=frozenset(rows)
        )

    def causes(self, model: str, match: PodMatches, pod: str, keys: Keys, tokens: Tokens) -> PromptCauses:
        """Return the prompt's tokens by cause, without any memory of lost blocks."""
        return PromptCauses(split_prompt(match, pod, len(tokens), self.block_tokens, Limit()))

    def speculate(
        self, request: DispatchKey, pod: str, keys: Keys, now_s: float, prompt: object = None
    ) -> None:
        """Count blocks as cached until `settle`."""
        self.speculative[request] = (pod, set(keys.tolist()))

    def settle(self, request: DispatchKey, now_s: float) -> None:
        """Remove the speculative blocks of a request."""
        self.speculative.pop(request, None)
        self.settled.append(request.request_id)

    def cancel_expectation(self, request: DispatchKey) -> None:
        """Record that a request was lost."""
        self.lost.append(request.request_id)

    def _prefix(self, keys: Sequence[int], pod: str) -> dict[str, int]:
        """Return the blocks of the pod's longest prefix by their fastest tier."""
        speculative = {key for where, keys in self.speculative.values() if where == pod for key in keys}
        holders = {GPU_TIER: self.held.get(pod, set()), SPECULATIVE_TIER: speculative}
        holders[CPU_TIER] = self.host.get(pod, set())
        found = dict.fromkeys(holders, 0)
        for key in keys:
            tier = next((tier for tier, held in holders.items() if key in held), None)
            if tier is None:
                break
            found[tier] += 1
        return found


@dataclass
class Bench:
    """Router with all its parts, connected as in production but without I/O."""

    pods: PodSet = field(default_factory=PodSet)
    index: PlainIndex = field(default_factory=PlainIndex)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    tokenizers: TokenizerRegistry = field(default_factory=lambda: TokenizerRegistry({TINY: TOKENIZER}))
    seed: int = 7
    ranker: Pipeline | None = None
    priorities: Mapping[str, int] = field(default_factory=dict)
    traces: Traces | None = None
    decisions_kept: int = 100
    clock: Callable[[], float] = lambda: 0.0  # tests pass all times explicitly

    def __post_init__(self) -> None:
        load_table = self.pods.load_table
        self.ledger = Ledger(LedgerParameters(), load_table)
        self.rates = PrefillRates(RateParameters(), load_table)
        self.metrics = RouterMetrics(self.registry)
        self.decision_log = DecisionLog(
            self.decisions_kept, lambda address: f"pod-{address.rpartition(':')[2]}", self.metrics
        )
        self.lifecycle = Lifecycle(
            self.ledger,
            self.rates,
            self.decision_log,
            self.index.settle,
            self.index.cancel_expectation,
            PodFailures(load_table, self._exclude),
            StatePods(self.pods, lambda outcome: self.metrics.count("stateful_requests", outcome)),
        )
        self.scheduler = Scheduler(
            load_table,
            self.ledger,
            np.random.default_rng(self.seed),
            block_tokens=self.index.block_tokens,
            ranker=self.ranker,
        )
        self.core = Router(
            pods=self.pods,
            tokenizers=self.tokenizers,
            index=self.index,
            admission=Admission(self.priorities, UtilizationDetector(load_age_max_s=5.0), load_table),
            scheduler=self.scheduler,
            dispatched=self.lifecycle.decided,
            failures=self.lifecycle.failures,
            clock=self.clock,
        )
        self.router = ObservedRouter(self.core, self.metrics, self.traces, self.lifecycle.states)

    def _exclude(self, pod: str, why: str) -> None:
        if pod in self.pods.current:
            self.pods.put(replace(self.pods.current[pod], failing=why))

    def with_pods(self, *pods: Pod) -> Bench:
        """Declare pods in their given state."""
        self.pods.declare([pod.entry for pod in pods])
        for pod in pods:
            self.pods.put(pod)
        return self

    def failure_s(self, pod: Pod) -> float:
        """Return the cost of a pod's failures in seconds."""
        table = self.pods.load_table
        return float(table.known(table.rows([pod.address]))["failure_s"][0])

    def keys(self, text: str, model: str = TINY) -> Keys:
        """Return the block keys of a completions prompt."""
        return self.index.block_keys(model, TOKENIZER.encode(text))

    def sample(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 if it has no sample."""
        return self.registry.get_sample_value(name, labels) or 0.0


def completion(request_id: str, prompt: object, *, model: str = TINY, **fields: object) -> RouteRequest:
    """Return a completions request."""
    body = {"model": model, "prompt": prompt, **fields}
    return RouteRequest(request_id, RequestKind.COMPLETIONS, model, body, body_bytes=len(str(prompt)))


def long_text(words: int, seed: int = 0) -> str:
    """Return a text of about `words` words whose prefix differs for every seed."""
    random = Random(seed)
    return f"{seed}: " + " ".join(str(random.randrange(1000)) for _ in range(words))


def ended(
    lifecycle: Lifecycle,
    request_id: str,
    source: str,
    now_s: float,
    *,
    failed: bool = False,
    refused: bool = False,
    dispatched_s: float | None = None,
    **facts: Any,
) -> Dispatch | None:
    """Report the end of a request; `facts`: other fields of the report."""
    report = RequestReport(request_id, end_event(failed=failed, refused=refused), source, **facts)
    return lifecycle.ended(report, now_s, dispatched_s=dispatched_s)
