"""Metrics of tokenizers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, normalizers

from router.observe.metrics import TokenizerCollector
from tokenization import TINY_DIRECTORY, PromptTokenizer


def test_metrics_report_the_encoder() -> None:
    """Metrics distinguish models that the fast encoder does not support, and count comparisons."""
    refused = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    refused.normalizer = normalizers.NFKC()
    tokenizers = {
        "fast": PromptTokenizer.from_directory(TINY_DIRECTORY),
        "slow": PromptTokenizer(refused, None, frozenset()),
    }
    registry = CollectorRegistry()
    registry.register(TokenizerCollector(tokenizers))

    def samples(name: str) -> list[float | None]:
        name = f"kvroute_router_tokenizer_{name}"
        return [registry.get_sample_value(name, {"model": model}) for model in tokenizers]

    assert samples("fast") == [1.0, 0.0]
    assert samples("checks_total") == [300.0, 0.0]
    assert samples("mismatches_total") == [0.0, 0.0]
