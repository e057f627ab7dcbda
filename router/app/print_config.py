"""Output of --print-config: a RouterConfig as YAML with units, secrets hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from router.app.config import RouterConfig
from router.config.picker_file import PickerConfig

# Units by the suffix of a setting's name; the first match wins.
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


def config_as_yaml(config: RouterConfig) -> str:
    """Return the effective configuration as YAML, by the names of `RouterConfig`'s fields."""
    return yaml.safe_dump(_settings(config), sort_keys=False, width=100)


def _settings(settings: Any) -> dict[str, Any]:
    shown = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not field.repr and value is not None:
            shown[field.name] = _HIDDEN
        else:
            units = (unit for ending, unit in _UNITS.items() if field.name.endswith(ending))
            shown[field.name] = _value(value, next(units, ""))
    return shown


def _value(value: Any, unit: str) -> Any:
    if isinstance(value, PickerConfig):
        return _picker(value)
    if dataclasses.is_dataclass(value):
        return _settings(value)
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
    """Return the parsed configuration file, without the defaults of its fields, and all feature gates."""
    return {"source": picker.section.source, "feature_gates": picker.gates, **picker.section.value()}
