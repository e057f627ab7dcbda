"""Attribute reporter: CEL expressions over the token usage of any API."""

from __future__ import annotations

import pytest
import yaml

from router.config.picker_file import parse_config
from router.plugins.attribute_reporter import AttributeReporter


def reporter(**expressions: str) -> AttributeReporter:
    """Return a reporter with these CEL expressions by attribute name."""
    attributes = [
        {"key": {"namespace": "envoy.lb", "name": name}, "expression": text}
        for name, text in expressions.items()
    ]
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": "request-attribute-reporter", "parameters": {"attributes": attributes}}],
    }
    made = AttributeReporter.from_config(parse_config(yaml.safe_dump(config), "c.yaml"))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b'{"prompt_tokens":3,"completion_tokens":4,"total_tokens":9}', (3, 4, 9)),
        (b'{"input_tokens":3,"output_tokens":4}', (3, 4, 7)),
        (b'{"input_tokens":3,"prompt_tokens":5,"output_tokens":4,"total_tokens":1}', (5, 4, 1)),
    ],
)
def test_usage_of_every_api_has_chat_field_names(usage: bytes, expected: tuple[int, int, int]) -> None:
    """Usage of the responses and messages APIs is renamed, and a missing total is computed."""
    made = reporter(a="usage.prompt_tokens", b="usage.completion_tokens", c="usage.total_tokens")
    assert made.report(usage) == {"envoy.lb": dict(zip("abc", expected, strict=True))}


def test_an_expression_over_a_missing_count_reports_nothing() -> None:
    """An expression over a missing count is skipped; the other expressions are still reported."""
    made = reporter(a="usage.prompt_tokens", c="usage.total_tokens")
    assert made.report(b'{"input_tokens":3}') == {"envoy.lb": {"a": 3}}
