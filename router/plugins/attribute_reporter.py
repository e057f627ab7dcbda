"""llm-d's request-attribute-reporter: publishes a response's token usage as Envoy dynamic metadata.

Configured CEL expressions turn the response's `usage` into integers. Needs the package's `cel` extra.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.repeated_log import RepeatedLog
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
    """Evaluates the CEL expressions of all reporters in a configuration."""

    attributes: Sequence[_Attribute]
    _repeated: RepeatedLog = field(default_factory=lambda: RepeatedLog(_log), init=False)

    @classmethod
    def from_config(cls, config: PickerConfig) -> AttributeReporter | None:
        """Return the reporter for a configuration; None if it has no attributes to report.

        Raises:
            ConfigError: An expression is invalid, or the `cel` extra is not installed.
        """
        entries = [entry for entry in config.plugins.values() if entry.type == TYPE]
        attributes = [one for entry in entries for one in entry.parameters_section.read(_Reporter).attributes]
        return cls(attributes) if attributes else None

    def report(self, usage_json: bytes) -> dict[str, dict[str, int]]:
        """Return the attributes of a usage by namespace and name, without those whose expression fails."""
        from celpy.adapter import json_to_cel
        from celpy.evaluation import CELEvalError

        reported: dict[str, dict[str, int]] = {}
        activation = {"usage": json_to_cel(_with_chat_names(msgspec.json.decode(usage_json)))}
        for attribute in self.attributes:
            try:
                if attribute.applies is None or attribute.applies.evaluate(activation):
                    value = int(attribute.program.evaluate(activation))
                    reported.setdefault(attribute.key.namespace, {})[attribute.key.name] = value
            except (CELEvalError, TypeError, ValueError, OverflowError) as error:
                text = "attribute not reported: name=%s error=%s"
                self._repeated.event("attribute_failed", attribute.key.name, text, attribute.key.name, error)
        return reported


def _with_chat_names(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a usage of any API with the field names of chat completions, which expressions refer to."""
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
        raise ValueError(f"{key}: CEL is not installed: pip install 'kvroute[cel]'") from None
    environment = Environment()
    try:
        return environment.program(environment.compile(expression))
    except CELParseError as error:
        raise ValueError(f"{key}: expected a CEL expression: {error}") from error
