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

    def collect(self) -> Iterable[Metric]:
        """How each tokenizer's texts are encoded."""
        is_fast = GaugeMetricFamily(
            "kvroute_router_tokenizer_fast",
            "1: fastokens encodes the model's prompts. 0: it refuses the tokenizer or was found to differ; "
            "the tokenizers library encodes them.",
            labels=["model"],
        )
        checks = CounterMetricFamily(
            "kvroute_router_tokenizer_checks",
            "Texts whose ids by fastokens were compared with the library's.",
            labels=["model"],
        )
        mismatches = CounterMetricFamily(
            "kvroute_router_tokenizer_mismatches",
            "Distinct texts that fastokens encodes unlike the library; after three the library encodes all.",
            labels=["model"],
        )
        for model, tokenizer in self._tokenizers.items():
            facts = tokenizer.encoder.facts
            is_fast.add_metric([model], facts.is_fast)
            checks.add_metric([model], facts.checks)
            mismatches.add_metric([model], facts.mismatches)
        return is_fast, checks, mismatches
