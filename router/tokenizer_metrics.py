"""What tokenizers tell of themselves: their counters in, metrics out. Made when the metrics are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenization.tokenizer import PromptTokenizer


class TokenizerCollector(Collector):
    """Registered beside the other collectors.

    Args:
        tokenizers: Those in this process, by base model.
    """

    def __init__(self, tokenizers: Mapping[str, PromptTokenizer]) -> None:
        self._tokenizers = tokenizers

    def describe(self) -> Iterable[Metric]:
        """The names alone."""
        return (*_renderings({}), *_conversations({}))

    def collect(self) -> Iterable[Metric]:
        """The counters."""
        return (*_renderings(self._tokenizers), *_conversations(self._tokenizers))


def _renderings(tokenizers: Mapping[str, PromptTokenizer]) -> Iterable[Metric]:
    uses = CounterMetricFamily(
        "kvroute_router_resumed_renderings",
        "Long chats that were rendered from their new messages on.",
        labels=["model"],
    )
    wrong = CounterMetricFamily(
        "kvroute_router_resumed_renderings_wrong",
        "Of those that were checked, the ones unlike the whole rendering; after one all are rendered whole.",
        labels=["model"],
    )
    for model, tokenizer in tokenizers.items():
        used, faults = tokenizer.resumed
        uses.add_metric([model], used)
        wrong.add_metric([model], faults)
    return uses, wrong


def _conversations(tokenizers: Mapping[str, PromptTokenizer]) -> Iterable[Metric]:
    memory = GaugeMetricFamily(
        "kvroute_router_conversation_memory_bytes",
        "Memory of what is known of conversations; --conversation-memory bounds it.",
        labels=["model"],
    )
    chats = CounterMetricFamily(
        "kvroute_router_conversation_lookups",
        "Chats whose first messages were known, and those of which nothing was.",
        labels=["model", "result"],
    )
    pushed_out = CounterMetricFamily(
        "kvroute_router_conversations_pushed_out",
        "Conversations that were forgotten to make room for others.",
        labels=["model"],
    )
    for model, tokenizer in tokenizers.items():
        remembered = tokenizer.remembered
        memory.add_metric([model], remembered.used_bytes)
        chats.add_metric([model, "known"], remembered.known)
        chats.add_metric([model, "new"], remembered.new)
        pushed_out.add_metric([model], remembered.pushed_out)
    return memory, chats, pushed_out
