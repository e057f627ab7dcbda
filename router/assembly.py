"""From a RouterConfig to its parts: where pods come from, who lets requests in, and who orders the pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from router.admission import Admission, UtilizationDetector
from router.config import RouterConfig
from router.config_fields import Duration
from router.cost import CostParameters
from router.flow import FlowControl
from router.flow_config import LOAD_AGES, fairness_of, flow_of
from router.ledger import Ledger
from router.plugins.build import build_pipeline, is_own
from router.plugins.labels import ROLE_LABEL
from router.plugins.pipeline import Pipeline
from router.pods import PodSet, PodSnapshot
from router.pods_source import PodsFile, PodsSource
from router.resources import Resources
from router.schedule import Scheduler
from router.tokens import TokenizerRegistry

# Plugins that split a request over engines, which hand its blocks on.
_HANDLERS = frozenset({"disagg-profile-handler", "pd-profile-handler", "disagg-headers-handler"})


def open_source(
    config: RouterConfig, registry: CollectorRegistry, take: Callable[[Resources], None]
) -> PodsSource:
    """Open where the pods come from.

    Args:
        take: Told objectives and rewrites, where the source tells them too, on any thread after its start.

    Raises:
        ConfigError: The pods file is wrong, or there are no credentials for a cluster.
    """
    if config.kube is None:
        assert config.pods_file is not None
        return PodsFile(config.pods_file, watch=config.watch_pods_file)
    # Only here: the official client takes about a second to import.
    from router.kube.source import KubeSource

    return KubeSource(config.kube, registry, take, rewrites=config.compat != "off")


def entrance(
    config: RouterConfig, objectives: Mapping[str, int], pods: PodSet, registry: CollectorRegistry
) -> tuple[Admission, FlowControl | None]:
    """Who sheds requests: admission by priority, or flow control, which then does it alone.

    Args:
        objectives: Priority by objective, beside those of the flags.

    Raises:
        ConfigError: Flow control is configured wrongly.
    """
    priorities = dict(config.priorities) | dict(objectives)
    picker = config.picker
    found = None
    if picker is not None:
        found = flow_of(picker, config.refresh_interval_s, config.load_age_max_s)
    if picker is None or found is None:
        detector = UtilizationDetector(load_age_max_s=Duration(_load_age_max_s(config)))
        return Admission(priorities, detector, pods.board), None
    admission = Admission(priorities, None, pods.board)
    if found[0].evicts and (config.compat == "off" or not config.responses_full):
        picker.flow.section.fail(
            "enableEviction",
            "needs --responses full and --compat answers: else no door can end a request",
        )
    flow = FlowControl(
        *found,
        pods,
        registry,
        priority_of=admission.priority_of,
        fairness_of=fairness_of(picker),
    )
    return admission, flow


def ranker(config: RouterConfig) -> Pipeline | None:
    """The configuration file's pipeline; None: the cost policy orders the pods.

    Raises:
        ConfigError: A plugin is wrong.
    """
    if config.picker is None or not config.picker.picks:
        return None
    return build_pipeline(
        config.picker,
        block_tokens=config.index.block_tokens,
        random=np.random.default_rng(),
    )


def scheduler(config: RouterConfig, pods: PodSet, ledger: Ledger, ranker: Pipeline | None) -> Scheduler:
    """Who picks.

    Args:
        ranker: Orders the pods; None: their cost does.
    """
    return Scheduler(
        pods.board,
        ledger,
        np.random.default_rng(),
        block_tokens=config.index.block_tokens,
        cost=CostParameters(load_age_max_s=_load_age_max_s(config)),
        ranker=ranker,
    )


def connector_sign(config: RouterConfig, pods: PodSnapshot) -> str | None:
    """Return why engines are taken to have a KV connector; None: nothing says that they have one."""
    if config.kv_connector != "auto":
        return "--kv-connector=true" if config.kv_connector == "true" else None
    for entry in config.picker.plugins.values() if config.picker is not None else ():
        if entry.type in _HANDLERS:
            return f"plugin {entry.type}"
    for pod in pods.values():
        if ROLE_LABEL in pod.entry.labels:
            return f"label {ROLE_LABEL} of pod {pod.name}"
    return None


def may_wait(config: RouterConfig, flow: FlowControl | None, tokenizers: TokenizerRegistry) -> bool:
    """Whether a pick may wait: for its turn, for another process, or for a plugin of the user's own."""
    if flow is not None or tokenizers.asks_others:
        return True
    plugins = config.picker.plugins.values() if config.picker is not None else ()
    return any(is_own(plugin.type) for plugin in plugins)


def plugin_states(ranker: Pipeline | None, flow: FlowControl | None) -> dict[str, Any]:
    """What plugins and flow control remember, for people."""
    states = dict(ranker.state()) if ranker is not None else {}
    return states if flow is None else {**states, "flow-control": {"state": flow.state()}}


def _load_age_max_s(config: RouterConfig) -> float:
    """How old an engine's account of its load may be and still count: two probes in a row may fail."""
    if config.load_age_max_s is not None:
        return config.load_age_max_s
    return max(CostParameters().load_age_max_s, LOAD_AGES * config.refresh_interval_s)
