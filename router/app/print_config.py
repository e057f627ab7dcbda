"""What a router would run with, for people: a RouterConfig in, YAML text with units out.

Whatever may hold a secret is hidden. Knows no flags: names are those of the settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from router.app.config import RouterConfig
from router.config.picker_file import PickerConfig

# By a name's ending: what follows the number. The first that fits counts.
_UNITS = {
    "_tokens_per_s": "tokens/s",
    "_s": "s",
    "_bytes": "bytes",
    "_bytes_max": "bytes",
    "_bytes_per_pod": "bytes",
    "_tokens": "tokens",
    "_tokens_per_pod": "tokens",
    "_blocks": "blocks",
}
_HIDDEN = "<hidden>"


def printed_config(config: RouterConfig) -> str:
    """The effective configuration."""
    return yaml.safe_dump(_told(config), sort_keys=False, width=100)


def _told(settings: Any) -> dict[str, Any]:
    told = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not field.repr and value is not None:
            told[field.name] = _HIDDEN
        else:
            units = (unit for ending, unit in _UNITS.items() if field.name.endswith(ending))
            told[field.name] = _value(value, next(units, ""))
    return told


def _value(value: Any, unit: str) -> Any:
    if isinstance(value, PickerConfig):
        return _picker(value)
    if dataclasses.is_dataclass(value):
        return _told(value)
    if isinstance(value, Mapping):
        return {str(key): _value(item, unit) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [_value(item, unit) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float) and unit:
        return f"{value:g} {unit}" if isinstance(value, float) else f"{value} {unit}"
    return str(value) if isinstance(value, Path) else value


def _picker(picker: PickerConfig) -> dict[str, Any]:
    """The file as it was understood; defaults that plugins add themselves are theirs to tell."""
    return {
        "source": picker.section.source,
        "feature_gates": dict(picker.gates),
        "plugins": [
            {"name": entry.name, "type": entry.type, "parameters": entry.parameters_section.value()}
            for entry in picker.plugins.values()
        ],
        "profiles": [
            {
                "name": profile.name,
                "plugins": [{"name": one.plugin_ref, "weight": one.weight} for one in profile.plugins],
            }
            for profile in picker.profiles
        ],
        "parsers": [parser.plugin_ref for parser in picker.parsers],
        "flow_control": picker.flow.section.value(),
        "saturation_detector": picker.detector.plugin_ref if picker.detector is not None else None,
    }
