"""Parser of InferenceObjective and InferenceModelRewrite documents: priorities and rewrite rules.

Unknown fields are rejected as in the configuration file. In a cluster, discovery watches the same two kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from router.config.fields import Int32, Section, Settings, Text, documents, read_text

_Version = Literal["llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"]


class _Kind(Settings, forbid_unknown_fields=False):
    api_version: _Version
    kind: Literal["InferenceObjective", "InferenceModelRewrite"]


class _Metadata(Settings, forbid_unknown_fields=False):
    name: Text = ""
    creation_timestamp: Text = ""


class _Resource(_Kind, forbid_unknown_fields=True):
    metadata: _Metadata
    status: Any = None


class _ObjectiveSpec(Settings):
    priority: Int32 = 0
    pool_ref: Any = None


class _Objective(_Resource):
    spec: _ObjectiveSpec = msgspec.field(default_factory=_ObjectiveSpec)

    def __post_init__(self) -> None:
        if not self.metadata.name:
            raise ValueError("metadata.name: is missing")


class _Model(Settings):
    value: Text
    type: Literal["Exact"] = "Exact"


class _Match(Settings):
    model: _Model


class _Target(Settings):
    model_rewrite: Text
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class _Rule(Settings):
    targets: Annotated[list[_Target], Meta(min_length=1)]
    matches: tuple[_Match, ...] = ()


class _RewriteSpec(Settings):
    rules: tuple[_Rule, ...] = ()
    pool_ref: Any = None


class _Rewrite(_Resource):
    spec: _RewriteSpec = msgspec.field(default_factory=_RewriteSpec)


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """Rule of an InferenceModelRewrite."""

    models: frozenset[str]  # models that it matches; empty for all
    targets: Sequence[tuple[str, int | None]]  # (model, weight); None if no weight is given

    def draw(self, random: np.random.Generator) -> str:
        """Draw a target model by weight; if only some targets have weights, the others are never drawn."""
        weights = np.array([weight or 0 for _, weight in self.targets], float)
        if not weights.any():
            weights[:] = 1.0
        place = int(np.searchsorted(weights.cumsum(), random.random() * weights.sum(), side="right"))
        return self.targets[place][0]


class RewriteRules:
    """All rewrite rules; the first rule for the exact model wins, then the first rule for all models.

    Args:
        rules: Rules of the oldest object first, in each object's order.
    """

    def __init__(self, rules: Sequence[RewriteRule], random: np.random.Generator) -> None:
        self._random = random
        self.replace(rules)

    def replace(self, rules: Sequence[RewriteRule]) -> None:
        """Replace all rules atomically: a request sees either the old or the new ones."""
        exact: dict[str, RewriteRule] = {}
        generic: RewriteRule | None = None
        for rule in rules:
            for model in rule.models:
                exact.setdefault(model, rule)
            if not rule.models and generic is None:
                generic = rule
        self._rules = exact, generic

    def target(self, model: str | None) -> str | None:
        """Return the model that replaces this one, or None if no rule matches."""
        exact, generic = self._rules
        rule = exact.get(model or "", generic)
        return rule.draw(self._random) if rule is not None else None


@dataclass(frozen=True, slots=True)
class Resources:
    """Priorities and rewrite rules of a resources file or a cluster."""

    priorities: Mapping[str, int] = field(default_factory=dict)  # by name of the InferenceObjective
    rules: Sequence[RewriteRule] = ()  # rules of the oldest object first


def read_resources(path: Path) -> Resources:
    """Read a resources file.

    Raises:
        ConfigError: The file cannot be read or is invalid.
    """
    priorities: dict[str, int] = {}
    rewrites: list[_Rewrite] = []
    for node in documents(read_text(path), str(path)):
        section = Section(str(path), "", node)
        if section.read(_Kind).kind == "InferenceObjective":
            objective = section.read(_Objective)
            priorities[objective.metadata.name] = objective.spec.priority
        else:
            rewrites.append(section.read(_Rewrite))
    # RFC 3339 timestamps sort as text; without timestamps the stable sort keeps the file's order.
    rewrites.sort(key=lambda rewrite: rewrite.metadata.creation_timestamp)
    return Resources(priorities, [_rule(rule) for rewrite in rewrites for rule in rewrite.spec.rules])


def _rule(rule: _Rule) -> RewriteRule:
    models = frozenset(match.model.value for match in rule.matches)
    return RewriteRule(models, [(target.model_rewrite, target.weight) for target in rule.targets])
