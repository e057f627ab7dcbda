"""Objectives and model rewrites from a file: YAML documents as in Kubernetes in, priorities and rules out.

Strict like the configuration. Knows the two kinds; discovery in a cluster brings the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from router.config_fields import Fields, documents, read_text
from router.rewrite import RewriteRule

_VERSIONS = ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")
_OBJECTIVE, _REWRITE = "InferenceObjective", "InferenceModelRewrite"
_PRIORITY_MAX = (1 << 31) - 1
_WEIGHT_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Resources:
    """What the file says.

    Attributes:
        priorities: By objective.
        rules: Those of the oldest object first.
    """

    priorities: Mapping[str, int] = field(default_factory=dict)
    rules: Sequence[RewriteRule] = ()


def read_resources(path: Path) -> Resources:
    """Reads the file.

    Raises:
        ConfigError: It cannot be read, or something in it is not understood.
    """
    priorities: dict[str, int] = {}
    rewrites: list[tuple[str, list[RewriteRule]]] = []
    for node in documents(read_text(path), str(path)):
        resource = Fields(str(path), "", node, ("apiVersion", "kind", "metadata", "spec", "status"))
        resource.choice("apiVersion", _VERSIONS)
        kind = resource.choice("kind", (_OBJECTIVE, _REWRITE))
        metadata = resource.fields("metadata", required=True)
        if kind == _OBJECTIVE:
            spec = resource.fields("spec", ("priority", "poolRef"))
            priority = spec.whole("priority", 0, least=-_PRIORITY_MAX - 1, most=_PRIORITY_MAX)
            priorities[metadata.text("name")] = priority
        else:
            spec = resource.fields("spec", ("rules", "poolRef"))
            rules = [_rule(rule) for rule in spec.each("rules", ("matches", "targets"))]
            # Times are written so that their order is that of their text; else the file's order stays.
            rewrites.append((metadata.text("creationTimestamp", ""), rules))
    rewrites.sort(key=lambda rewrite: rewrite[0])
    return Resources(priorities, [rule for _, rules in rewrites for rule in rules])


def _rule(rule: Fields) -> RewriteRule:
    models = set()
    for match in rule.each("matches", ("model",)):
        model = match.fields("model", ("type", "value"), required=True)
        model.choice("type", ("Exact",), "Exact")
        models.add(model.text("value"))
    targets = []
    for target in rule.each("targets", ("weight", "modelRewrite")):
        weight = target.whole("weight", 0, least=1, most=_WEIGHT_MAX) if "weight" in target else None
        targets.append((target.text("modelRewrite"), weight))
    if not targets:
        rule.fail("targets", "must have at least one target")
    return RewriteRule(frozenset(models), targets)
