"""Facts of an engine's metrics page that the doctor judges: block size, caching, drafter and sleep."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_CONFIGS = ("vllm:cache_config_info", "sglang:cache_config_info")
_SLEEP, _DRAFTS = "vllm:engine_sleep_state", "vllm:spec_decode_num_drafts"


@dataclass(frozen=True, slots=True)
class EnginePage:
    """Facts of a metrics page; None where it does not tell."""

    is_known: bool = False  # whether it is the page of a known engine
    block_tokens: int | None = None
    is_caching: bool | None = None
    has_drafter: bool = False
    is_asleep: bool = False


def read_engine_page(text: str) -> EnginePage:
    """Parse a metrics page in Prometheus text format; raises a ValueError if it is invalid."""
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    configs = [sample.labels for name in _CONFIGS for sample in families.get(name, ())]
    sizes = [labels.get("block_size") or labels.get("page_size") or "" for labels in configs]
    caching = [labels["enable_prefix_caching"] for labels in configs if "enable_prefix_caching" in labels]
    sleeps = [one for one in families.get(_SLEEP, ()) if one.labels.get("sleep_state") == "awake"]
    return EnginePage(
        is_known=any(name.startswith(("vllm:", "sglang:", "trtllm_", "nv_trt_llm_")) for name in families),
        block_tokens=next((int(size) for size in sizes if size.isdecimal() and int(size)), None),
        is_caching="False" not in caching if caching else None,
        # Without a TYPE line the parser leaves "_total" at the name.
        has_drafter=any(name.startswith(_DRAFTS) and samples for name, samples in families.items()),
        is_asleep=bool(sleeps) and not any(one.value for one in sleeps),
    )
