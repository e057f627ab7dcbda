"""A whole router without sockets: known pods, a plain index that tests fill by hand, a fixed random seed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from prometheus_client import CollectorRegistry

from indexer import PodMatch, StreamState
from indexer.pods_file import PodEntry
from router.cost import CostParameters
from router.explain import Explain
from router.ledger import Ledger, LedgerParameters
from router.metrics import RouterMetrics
from router.outcomes import Outcomes
from router.pods import Pod, PodSet, ServedModels
from router.rates import PrefillRates, RateParameters
from router.request import RequestKind, RouteRequest
from router.route import Router
from router.tokens import TokenizerRegistry
from tokenization import TINY_DIRECTORY, PromptTokenizer

TINY = "kvroute-tiny"
TOKENIZER = PromptTokenizer.from_directory(TINY_DIRECTORY)


def entry(address: str, **labels: str) -> PodEntry:
    """A declared pod named after its port."""
    host, _, port = address.rpartition(":")
    return PodEntry(name=f"pod-{port}", namespace="test", address=host, port=int(port), labels=labels)


def ready_pod(address: str, *, model: str = TINY, adapters: Collection[str] = ()) -> Pod:
    """A pod that may be given requests."""
    models = ServedModels(model, frozenset({model}), frozenset(adapters), 100_000)
    pod = Pod(address=address, name=f"pod-{address.rpartition(':')[2]}", entry=entry(address))
    return replace(pod, ready=True, why="", probed=True, models=models)


class PlainIndex:
    """The indexer's seam over plain sets; `hold` is what a test's pods announce."""

    block_tokens = 16

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.host: dict[str, set[int]] = {}
        self.speculative: dict[str, tuple[str, Sequence[int]]] = {}
        self.settled: list[str] = []
        self.state = StreamState.EXACT

    def block_keys(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Chained hashes of full blocks."""
        keys, parent = [], hash((model, lora_name, cache_salt))
        for start in range(0, len(token_ids) - self.block_tokens + 1, self.block_tokens):
            parent = hash((parent, *token_ids[start : start + self.block_tokens]))
            keys.append(parent)
        return keys

    def hold(self, pod: str, keys: Sequence[int], *, host: bool = False) -> None:
        """The pod has these blocks."""
        (self.host if host else self.held).setdefault(pod, set()).update(keys)

    def match(self, keys: Sequence[int], pods: Collection[str]) -> dict[str, PodMatch]:
        """Longest unbroken prefix per pod."""
        return {pod: self._match(keys, pod) for pod in pods}

    def speculate(self, request_id: str, pod: str, keys: Sequence[int], now_s: float) -> None:
        """Counts as held until settled."""
        self.speculative[request_id] = (pod, keys)

    def settle(self, request_id: str, now_s: float) -> None:
        """Ends a speculation."""
        self.speculative.pop(request_id, None)
        self.settled.append(request_id)

    def _match(self, keys: Sequence[int], pod: str) -> PodMatch:
        device = set(self.held.get(pod, ()))
        for where, assumed in self.speculative.values():
            if where == pod:
                device.update(assumed)
        host = self.host.get(pod, set())
        length = next((at for at, key in enumerate(keys) if key not in device | host), len(keys))
        on_host = sum(key not in device for key in keys[:length])
        tiers = {"gpu": length - on_host, "cpu": on_host}
        return PodMatch(pod, length, tiers, length - 0.2 * on_host, self.state)


@dataclass
class Bench:
    """The parts of one router, wired."""

    pods: PodSet = field(default_factory=PodSet)
    index: PlainIndex = field(default_factory=PlainIndex)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    ledger: Ledger = field(default_factory=lambda: Ledger(LedgerParameters()))
    rates: PrefillRates = field(default_factory=lambda: PrefillRates(RateParameters()))
    tokenizers: TokenizerRegistry = field(default_factory=lambda: TokenizerRegistry({TINY: TOKENIZER}))
    seed: int = 7

    def __post_init__(self) -> None:
        self.metrics = RouterMetrics(self.registry)
        self.explain = Explain(100, lambda address: f"pod-{address.rpartition(':')[2]}")
        self.outcomes = Outcomes(self.ledger, self.rates, self.explain, self.metrics, self.index.settle)
        self.router = Router(
            pods=self.pods,
            tokenizers=self.tokenizers,
            index=self.index,
            ledger=self.ledger,
            rates=self.rates,
            cost=CostParameters(),
            sink=self.outcomes,
            random=Random(self.seed),
        )

    def with_pods(self, *pods: Pod) -> Bench:
        """Declares pods with what is already known of them."""
        self.pods.declare([pod.entry for pod in pods])
        for pod in pods:
            self.pods.put(pod)
        return self

    def keys(self, text: str, model: str = TINY) -> list[int]:
        """Block keys of a completions prompt."""
        return self.index.block_keys(model, TOKENIZER.encode(text))

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where it has none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0


def completion(request_id: str, prompt: object, *, model: str = TINY, **fields: object) -> RouteRequest:
    """A completions request."""
    body = {"model": model, "prompt": prompt, **fields}
    return RouteRequest(request_id, RequestKind.COMPLETIONS, model, body, body_bytes=len(str(prompt)))


def long_text(words: int, seed: int = 0) -> str:
    """Text of about `words` words that no other seed shares a prefix with."""
    random = Random(seed)
    return f"{seed}: " + " ".join(str(random.randrange(1000)) for _ in range(words))
