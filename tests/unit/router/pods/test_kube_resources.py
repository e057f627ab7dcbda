"""Conversion of objectives and rewrites to priorities and rules: pool, order and contradictions."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.config.kube import OLD_GROUP, POOL_GROUP, KubeConfig
from router.config.picker_file import RewriteRules
from router.pods.kube.objects import BadObjectError, ObjectiveObject, RewriteObject, read
from router.pods.kube.pods import priorities_of, rewrites_of
from tests.support.kube.objects import JSON, raw

POOL = KubeConfig(pool="p")


def objective(named: str, priority: int | None, **reference: str) -> ObjectiveObject:
    """Return an objective of the router's pool, unless the reference says otherwise."""
    spec = {"priority": priority, "poolRef": {"name": "p", **reference}}
    return read(raw({"metadata": {"name": named}, "spec": spec}), ObjectiveObject)


def rewrite(name: str, *rules: Any, made: str = "2026-01-01T00:00:00Z", pool: str = "p") -> RewriteObject:
    """Return a rewrite."""
    metadata = {"name": name, "creationTimestamp": made}
    return read(
        raw({"metadata": metadata, "spec": {"poolRef": {"name": pool}, "rules": rules}}), RewriteObject
    )


def rule(target: str, *models: str) -> dict[str, Any]:
    """Return a rule for these models, or for all."""
    return {
        "matches": [{"model": {"value": model}} for model in models],
        "targets": [{"modelRewrite": target}],
    }


def test_objectives_of_the_pool_have_priorities() -> None:
    """Only objectives of the router's pool apply; omitted fields of poolRef have the CRD's defaults."""
    objects = [
        objective("a", 5),
        objective("unset", None),
        objective("spelled", -1, group=POOL_GROUP, kind="InferencePool"),
        objective("b", 1, group=OLD_GROUP),
        objective("c", 1, name="q"),
        objective("d", 1, kind="Service"),
    ]
    assert priorities_of(objects, POOL) == {"a": 5, "unset": 0, "spelled": -1}
    assert priorities_of(objects, KubeConfig(pool="p", pool_group=OLD_GROUP)) == {"b": 1}


def test_an_objective_being_deleted_does_not_apply() -> None:
    """The priority ends with the deletion timestamp, before the finalizers have run."""
    ending = read(
        raw(
            {
                "metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"priority": 1, "poolRef": {"name": "p"}},
            }
        ),
        ObjectiveObject,
    )
    assert priorities_of([ending], POOL) == {}


def test_rewrites_are_ordered_by_age_and_exactness() -> None:
    """An exact match wins over a general one, then the older object, the first name and the first rule."""
    found = rewrites_of(
        [
            rewrite("b", rule("young", "m"), made="2026-01-02T00:00:00Z"),
            rewrite("c", rule("c", "m"), rule("c-second", "m")),
            rewrite("a", rule("general"), rule("a", "other")),
            rewrite("foreign", rule("foreign", "m"), pool="q", made="2025-01-01T00:00:00Z"),
        ],
        POOL,
    )
    assert found.problems == {}
    rules = RewriteRules(found.rules, np.random.default_rng(1))
    assert [rules.target(model) for model in ("m", "other", "unknown")] == ["c", "a", "general"]


def test_rules_can_be_replaced() -> None:
    """After a replacement only the new rules apply."""
    rules = RewriteRules(rewrites_of([rewrite("a", rule("x", "m"))], POOL).rules, np.random.default_rng(1))
    assert rules.target("m") == "x"
    rules.replace(rewrites_of([rewrite("a", rule("y", "n"))], POOL).rules)
    assert (rules.target("m"), rules.target("n")) == (None, "y")


def test_contradicting_rules_are_reported() -> None:
    """Rules with partial weights are reported and used; those with an unknown match type are left out."""
    partly = {"targets": [{"modelRewrite": "a", "weight": 1}, {"modelRewrite": "b"}]}
    pattern = {"matches": [{"model": {"value": "m", "type": "Regex"}}], "targets": [{"modelRewrite": "a"}]}
    found = rewrites_of([rewrite("w", partly), rewrite("x", rule("a", "m"), pattern)], POOL)
    assert set(found.problems) == {"w", "x"}
    assert found.problems["x"].startswith("rules[1]: ")
    assert len(found.rules) == 2


@given(st.dictionaries(st.sampled_from(["rules", "poolRef", "priority"]), JSON))
def test_hostile_objects_are_rejected_or_usable(spec: dict[str, Any]) -> None:
    """Objects of any shape raise BadObjectError or give usable priorities and rules."""
    made = raw({"metadata": {"name": "a"}, "spec": {"poolRef": {"name": "p"}, "rules": [], **spec}})
    try:
        priorities = priorities_of([read(made, ObjectiveObject)], POOL)
        assert all(-(1 << 31) <= priority < 1 << 31 for priority in priorities.values())
    except BadObjectError:
        pass
    try:
        rules = rewrites_of([read(made, RewriteObject)], POOL).rules
    except BadObjectError:
        return
    RewriteRules(rules, np.random.default_rng(1)).target("m")
