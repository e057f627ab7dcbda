"""Tokenizers' counters, as their metrics are read."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from router.tokenizer_metrics import TokenizerCollector
from tests.unit.test_loop_run import says, user
from tests.unit.test_resumed import LONG, raw
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.openai_prompts import begin_chat


def test_metrics_tell_whether_conversations_are_known_and_what_that_takes() -> None:
    """A chat that goes on counts as known, its first turn as new; bytes and what had to go are told."""
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    registry = CollectorRegistry()
    registry.register(TokenizerCollector({"m": tokenizer}))

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvroute_router_{name}", {"model": "m", **labels})

    messages = [user(LONG)]
    for _ in range(3):
        begin_chat({"messages": raw(messages)}, tokenizer).ids()
        messages += [says(LONG), user(LONG)]
    assert sample("conversation_lookups_total", result="new") == 1.0
    assert sample("conversation_lookups_total", result="known") == 2.0
    assert 0 < (sample("conversation_memory_bytes") or 0.0) < 1 << 20
    assert sample("conversations_pushed_out_total") == 0.0
    tokenizer.bound_conversations(0)
    assert sample("conversation_memory_bytes") == 0.0
    assert sample("conversations_pushed_out_total") == 1.0
