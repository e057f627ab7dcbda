"""A response's usage as dynamic metadata: the reference's request-attribute-reporter.

In: `usage` as the response wrote it. Out: by namespace and name, the whole numbers that configured CEL
expressions make of it. Needs the package's `cel` extra.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.config.fields import Settings, Text
from router.config.picker_file import PickerConfig

_log = logging.getLogger(__name__)

TYPE = "request-attribute-reporter"


class _Key(Settings):
    name: Text
    namespace: Text = "envoy.lb"


class _Attribute(Settings):
    key: _Key
    expression: Text
    condition: Text | None = None

    def __post_init__(self) -> None:
        self.program = _compiled("expression", self.expression)
        self.applies = None if self.condition is None else _compiled("condition", self.condition)


class _Reporter(Settings):
    attributes: tuple[_Attribute, ...] = ()


@dataclass(eq=False)
class AttributeReporter:
    """All reporters of a configuration."""

    attributes: Sequence[_Attribute]  # what they report
    _complaint: str = field(default="", init=False)

    @classmethod
    def of(cls, config: PickerConfig) -> AttributeReporter | None:
        """The reporters that a configuration names; None: none.

        Raises:
            ConfigError: An expression is wrong, or the extra is missing.
        """
        entries = [entry for entry in config.plugins.values() if entry.type == TYPE]
        attributes = [one for entry in entries for one in entry.parameters_section.read(_Reporter).attributes]
        return cls(attributes) if attributes else None

    def report(self, usage_json: bytes) -> dict[str, dict[str, int]]:
        """What a usage comes to; an expression that fails on it reports nothing."""
        from celpy.adapter import json_to_cel
        from celpy.evaluation import CELEvalError

        told: dict[str, dict[str, int]] = {}
        activation = {"usage": json_to_cel(_in_one_form(msgspec.json.decode(usage_json)))}
        for attribute in self.attributes:
            try:
                if attribute.applies is None or attribute.applies.evaluate(activation):
                    value = int(attribute.program.evaluate(activation))
                    told.setdefault(attribute.key.namespace, {})[attribute.key.name] = value
            except (CELEvalError, TypeError, ValueError, OverflowError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("attribute %s is not reported: %s", attribute.key.name, error)
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


def _compiled(key: str, expression: str) -> Any:
    try:
        from celpy import Environment
        from celpy.celparser import CELParseError
    except ImportError:
        raise ValueError(f"{key}: needs CEL: pip install 'kvroute[cel]'") from None
    environment = Environment()
    try:
        return environment.program(environment.compile(expression))
    except CELParseError as error:
        raise ValueError(f"{key}: is no CEL expression: {error}") from error
