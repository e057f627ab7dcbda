"""Detection of KV connectors in a pool's engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import yaml

from router.app.config import parse_flags
from router.app.wiring import kv_connector_sign
from router.pods.pod_set import PodSet
from tests.support.router.bench import entry

PODS = ["--pods-file", "/pods.yaml"]
DISAGGREGATES = yaml.safe_dump(
    {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": "disagg-profile-handler"}, {"type": "queue-scorer"}],
    }
)
WITH_ROLE = {"llm-d.ai/role": "decode"}


@pytest.mark.parametrize(
    ("flags", "labels", "sign"),
    [
        ([], {}, None),
        ([], WITH_ROLE, "label llm-d.ai/role of pod pod-8000"),
        (["--config-text", DISAGGREGATES], {}, "plugin disagg-profile-handler"),
        (["--kv-connector=true"], {}, "--kv-connector=true"),
        (["--kv-connector=false", "--config-text", DISAGGREGATES], WITH_ROLE, None),
    ],
)
def test_a_kv_connector_is_detected_by_flag_plugin_or_label(
    flags: Sequence[str], labels: dict[str, str], sign: str | None
) -> None:
    """The flag decides; without it a disaggregation plugin or a pod's role label does."""
    pods = PodSet()
    pods.declare([entry("10.0.0.1:8000", **labels)])
    config, _ = parse_flags([*PODS, *flags])
    assert kv_connector_sign(config, pods.current) == sign
