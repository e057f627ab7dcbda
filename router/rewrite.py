"""Model names rewritten on the way in and restored on the way out: rules and bytes in, bytes out.

Rules are those of InferenceModelRewrite. A rewritten body keeps its other values as they are: order, and
numbers of any size. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """One rule."""

    models: frozenset[str]  # names that it is for; empty: all
    targets: Sequence[tuple[str, int | None]]  # (model, weight); None: no weight given

    def draw(self, random: np.random.Generator) -> str:
        """A target, by weight; where only some have one, the others are never drawn."""
        weights = np.array([weight or 0 for _, weight in self.targets], float)
        if not weights.any():
            weights[:] = 1.0
        place = int(np.searchsorted(weights.cumsum(), random.random() * weights.sum(), side="right"))
        return self.targets[place][0]


class RewriteRules:
    """All rules; the first for exactly the model wins, then the first for all models.

    Args:
        rules: Oldest object first, in the objects' order.
    """

    def __init__(self, rules: Sequence[RewriteRule], random: np.random.Generator) -> None:
        self._random = random
        self.replace(rules)

    def replace(self, rules: Sequence[RewriteRule]) -> None:
        """Other rules from now on; a request sees those before or these."""
        exact: dict[str, RewriteRule] = {}
        generic: RewriteRule | None = None
        for rule in rules:
            for model in rule.models:
                exact.setdefault(model, rule)
            if not rule.models and generic is None:
                generic = rule
        self._rules = exact, generic

    def target(self, model: str | None) -> str | None:
        """What a model becomes; None: no rule is for it."""
        exact, generic = self._rules
        rule = exact.get(model or "", generic)
        return rule.draw(self._random) if rule is not None else None


def with_model(body: bytes, model: str) -> bytes:
    """A JSON object with another model.

    Raises:
        ValueError: It is no JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def restored_model(body: bytes, target: str, client: str) -> bytes:
    """A response, or a piece of one, with the model named as the client named it.

    Every `"model":"TARGET"` is replaced; only where there is none, every `"model": "TARGET"`.
    """
    if not target or not client or target == client:
        return body
    before, after = msgspec.json.encode(target), msgspec.json.encode(client)
    for lead in (b'"model":', b'"model": '):
        if lead + before in body:
            return body.replace(lead + before, lead + after)
    return body
