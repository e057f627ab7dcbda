"""From a RouterConfig to the door in the reference's form: its parsers, rules and reporters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.attribute_reporter import AttributeReporter
from router.config import RouterConfig
from router.config_file import PickerConfig
from router.flow import Evictions
from router.gateway_pick import GatewayPick
from router.metrics import RouterMetrics
from router.outcomes import Outcomes
from router.parsers import DEFAULT_PARSERS, PARSERS, Parsers
from router.pods import PodSet
from router.reference_door import ReferenceDoor, ReferenceOptions, ReferenceParts
from router.rewrite import RewriteRules

_SERVED = "destination-endpoint-served-verifier"


def reference_door(
    config: RouterConfig,
    rewrites: RewriteRules,
    picks: GatewayPick,
    outcomes: Outcomes,
    metrics: RouterMetrics,
    pods: PodSet,
    evictions: Evictions | None = None,
) -> ReferenceDoor:
    """Makes the door.

    Raises:
        ConfigError: A parser or a reporter is wrong.
    """
    random, picker = np.random.default_rng(), config.picker
    parts = ReferenceParts(
        picks=picks,
        outcomes=outcomes,
        metrics=metrics,
        pods=pods,
        parsers=Parsers(_parser_types(picker) if picker is not None else DEFAULT_PARSERS),
        rewrites=rewrites,
        reporter=AttributeReporter.of(picker) if picker is not None else None,
        random=random,
        evictions=evictions,
    )
    options = ReferenceOptions(
        max_request_bytes=config.max_request_bytes,
        responses_full=config.responses_full,
        emit_scores=config.emit_endpoint_scores,
        subset_filter=config.subset_filter,
        tells_served=picker is not None and any(one.type == _SERVED for one in picker.plugins.values()),
    )
    return ReferenceDoor(parts, options)


def _parser_types(picker: PickerConfig) -> Sequence[str]:
    types = []
    for reference in picker.parsers:
        kind = picker.plugins[reference.plugin_ref].type
        if kind not in PARSERS:
            reference.section.fail("pluginRef", f"{kind} is no parser; there are {', '.join(PARSERS)}")
        types.append(kind)
    return types or DEFAULT_PARSERS
