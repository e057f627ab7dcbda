"""A response's usage as dynamic metadata: the reference's request-attribute-reporter.

In: `usage` as the response wrote it. Out: by namespace and name, the whole numbers that configured CEL
expressions make of it. Needs the package's `cel` extra.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.config_fields import Settings, Text
from router.config_file import PickerConfig

_log = logging.getLogger(__name__)

TYPE = "request-attribute-reporter"


class _Key(Settings):
    name: Text
    namespace: Text = "envoy.lb"


class _Item(Settings):
    key: _Key
    expression: Text
    condition: Text | None = None


class _Reporter(Settings):
    attributes: tuple[_Item, ...] = ()


@dataclass(frozen=True, slots=True)
class _Attribute:
    namespace: str
    name: str
    expression: Any
    condition: Any


class AttributeReporter:
    """All reporters of a configuration.

    Args:
        attributes: What they report.
    """

    def __init__(self, attributes: Sequence[_Attribute]) -> None:
        self._attributes = tuple(attributes)
        self._complaint = ""

    @classmethod
    def of(cls, config: PickerConfig) -> AttributeReporter | None:
        """The reporters that a configuration names; None: none.

        Raises:
            ConfigError: An expression is wrong, or the extra is missing.
        """
        entries = [entry for entry in config.plugins.values() if entry.type == TYPE]
        attributes = [attribute for entry in entries for attribute in _attributes(entry.told.read(_Reporter))]
        return cls(attributes) if attributes else None

    def report(self, usage_json: bytes) -> dict[str, dict[str, int]]:
        """What a usage comes to; an expression that fails on it reports nothing."""
        from celpy.adapter import json_to_cel
        from celpy.evaluation import CELEvalError

        told: dict[str, dict[str, int]] = {}
        activation = {"usage": json_to_cel(_in_one_form(msgspec.json.decode(usage_json)))}
        for attribute in self._attributes:
            try:
                if attribute.condition is None or attribute.condition.evaluate(activation):
                    value = int(attribute.expression.evaluate(activation))
                    told.setdefault(attribute.namespace, {})[attribute.name] = value
            except (CELEvalError, TypeError, ValueError, OverflowError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("attribute %s is not reported: %s", attribute.name, error)
        return told


def _in_one_form(usage: dict[str, Any]) -> dict[str, Any]:
    """With the names that chat completions have, whichever API told it; expressions are written in these."""
    for name, other in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        if name not in usage and other in usage:
            usage[name] = usage[other]
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if "total_tokens" not in usage and all(isinstance(count, int) for count in counts):
        usage["total_tokens"] = sum(counts)
    return usage


def _attributes(reporter: _Reporter) -> Iterator[_Attribute]:
    for item in reporter.attributes:
        condition = None if item.condition is None else _compiled(item, "condition", item.condition)
        expression = _compiled(item, "expression", item.expression)
        yield _Attribute(item.key.namespace, item.key.name, expression, condition)


def _compiled(item: _Item, key: str, expression: str) -> Any:
    try:
        from celpy import Environment
        from celpy.celparser import CELParseError
    except ImportError:
        item.section.fail(key, "needs CEL: pip install 'kvroute[cel]'")
    environment = Environment()
    try:
        return environment.program(environment.compile(expression))
    except CELParseError as error:
        item.section.fail(key, f"is no CEL expression: {error}")
