"""Translation of a picker configuration of llm-d: its meaning here, and its form in the words of v0.11.

The meanings, and what is ignored, are those of the loader. Changes are spliced into the text, so that
comments outside of changed entries are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from msgspec.structs import asdict

from router.config.fields import Section
from router.config.picker_file import PickerConfig, PluginEntry, parse_config
from router.errors import ConfigError
from router.plugins.build import REMOVED, ignored_parameters, meaning
from router.plugins.labels import ByLabelFilter
from router.plugins.profiles import DisaggHandlerSettings, PdHandlerSettings
from router.plugins.scorers import PRECISE, PRODUCER_KEY
from router.pods.pod_set import ROLE_LABEL

_GROUP, _OLD_GROUP = "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"
_HANDLERS = {"pd-profile-handler": PdHandlerSettings, "disagg-profile-handler": DisaggHandlerSettings}
_HANDLER_KEYS = ("stageOrder", "primaryPort", "profiles", "deciders")
_RENAMED = {"by-label-selector": "label-selector-filter", "tokenizer": "token-producer"}
_SECTIONS = {
    "featureGates": "flowControl queues requests while the pods are saturated; no other gate has an effect",
    "schedulingProfiles": "each runs its filters, adds up scores times weights, and picks",
    "dataLayer": "pods are always watched and scraped; only `discovery` has an effect",
    "requestHandler": "parsers, by the longest suffix of the path",
    "flowControl": "limits and order of the queue; without effect unless featureGates has flowControl",
    "saturationDetector": "deprecated in llm-d; give it in flowControl",
    "parser": "deprecated in llm-d; give it in requestHandler.parsers",
}


@dataclass(eq=False)
class Migration:
    """Findings about a configuration, and the changes to its text."""

    config: PickerConfig
    source: str  # the text
    lines: list[str] = field(default_factory=list)  # findings with file, line and place
    problems: int = 0  # findings that keep the router from starting
    edits: list[tuple[int, int, str]] = field(default_factory=list)  # start, end and new text

    def text(self) -> str:
        """Return the configuration in new words."""
        text = self.source
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def replace(self, items: yaml.SequenceNode, at: int, new: list[dict[str, Any]]) -> None:
        """Replace an item of a list in block style by others; say so where that cannot be done."""
        text, item = self.source, items.value[at]
        first = item.start_mark.index
        if items.flow_style or not items.start_mark.index <= first < items.end_mark.index:
            place = Section(self.config.section.source, "", item).location("")
            self.lines.append(f"{place}: not changed: the list is in flow style, or the item an alias")
            return
        start, end = text.rindex("-", 0, first), _end(item)
        line = text.rfind("\n", 0, start) + 1
        if new:
            printed = yaml.safe_dump(new, sort_keys=False).rstrip()
            self.edits.append((start, end, printed.replace("\n", "\n" + " " * (start - line))))
        else:
            self.edits.append((line, (text.find("\n", end) + 1) or len(text), ""))


def migrate(text: str, source: str) -> Migration:
    """Examine a configuration; `source` names it in the findings.

    Raises:
        ConfigError: The text is no picker configuration, or a section other than the plugins is invalid.
    """
    migration = Migration(parse_config(text, source), text)
    plugins: Any = migration.config.section.at("plugins").node
    for at, entry in enumerate(migration.config.entries):
        try:
            migration.lines.append(f"{entry.section.location('')}: {entry.type}: {meaning(entry)}")
        except ConfigError as error:
            migration.problems += 1
            migration.lines.append(f"{error} [not supported here]")
        else:
            _modernize(migration, entry, plugins, at)
    _examine_sections(migration)
    if not migration.problems:
        migration.lines += ignored_parameters(migration.config)
    migration.lines.sort(key=lambda line: int(re.findall(r":(\d+): ", line)[0]))
    return migration


def _modernize(migration: Migration, entry: PluginEntry, plugins: Any, at: int) -> None:
    """Add what llm-d v0.11 removes of one plugin, and what replaces it."""
    new, instead = _new_entries(migration, entry), REMOVED.get(entry.type)
    if instead is not None or new is not None:
        kept = "" if new is not None else "; no label selector says the same, so the entry is left as it is"
        what = "its flat parameters" if instead is None else f"it; there: {instead}{kept}"
        migration.lines.append(f"{entry.section.location('')}: {entry.type}: llm-d v0.11 removes {what}")
    if new is not None:
        migration.replace(plugins, at, new)
    if new == []:
        for node, path in _nodes(migration.config.section.node):
            if path[-1] == "plugins" and len(path) > 1 and isinstance(node, yaml.SequenceNode):
                for place, item in enumerate(node.value):
                    if Section("", "", item).value().get("pluginRef") == entry.name:
                        migration.replace(node, place, [])


def _new_entries(migration: Migration, entry: PluginEntry) -> list[dict[str, Any]] | None:
    """Return the entries that replace one in new words; None if it stays as it is."""
    old, section = entry.section.value(), entry.parameters_section
    values = [node.value for node, _ in _nodes(migration.config.section.node)]
    # An entry without a name may be referred to by its old type.
    is_named = "name" in old or values.count(entry.name) > 1
    name = {"name": entry.name} if is_named else {}
    parameters = {"parameters": old["parameters"]} if old.get("parameters") else {}
    if (renamed := _RENAMED.get(entry.type)) is not None:
        return [{"type": renamed, **name, **parameters}]
    if (handler := _HANDLERS.get(entry.type)) is not None:
        given = section.value()
        if entry.type not in REMOVED and given.keys() <= set(_HANDLER_KEYS):
            return None
        read = section.read(handler)
        nested = {key: given[key] for key in _HANDLER_KEYS[:2] if key in given}
        for group, settings in (("profiles", read.profiles), ("deciders", read.deciders)):
            named = asdict(settings)
            nested[group] = {key: value for key, value in named.items() if value}
        return [{"type": "disagg-profile-handler", **name, "parameters": nested}]
    if entry.type == "by-label":
        label = section.read(ByLabelFilter)
        if label.valid_values and label.allows_no_label:
            return None
        allowed = {"operator": "In", "values": list(label.valid_values)} if label.valid_values else None
        expression = {"key": label.label, **(allowed or {"operator": "DoesNotExist"})}
        return [{"type": "label-selector-filter", **name, "parameters": {"matchExpressions": [expression]}}]
    if entry.type == "precise-prefix-cache-scorer":
        producer = f"{entry.name}-producer" if PRECISE in migration.config.plugins else PRECISE
        for node, path in _nodes(migration.config.section.node):
            if node.value == entry.name and (path[-1] == PRODUCER_KEY or "extractors" in path):
                migration.edits.append((node.start_mark.index, node.end_mark.index, producer))
        scorer = {"type": "prefix-cache-scorer", "name": entry.name, "parameters": {PRODUCER_KEY: producer}}
        return [{"type": PRECISE, "name": producer, **parameters}, scorer]
    return [] if entry.type in REMOVED else None


def _examine_sections(migration: Migration) -> None:
    """Add the findings and changes outside of the plugins."""
    section, lines = migration.config.section, migration.lines
    for node, path in _nodes(section.node):
        line = f"{section.source}:{node.start_mark.line + 1}"
        if len(path) == 2 and (told := _SECTIONS.get(path[1])) is not None:
            lines.append(f"{section.location(path[1], at_key=True)}: {told}")
        if path[1:] == ("apiVersion",) and node.value == _OLD_GROUP:
            lines.append(f"{line}: apiVersion: the old name of {_GROUP}")
            migration.edits.append((node.start_mark.index, node.end_mark.index, _GROUP))
        if node.value == "both":
            text = f"llm-d v0.11 removes the value `both` of {ROLE_LABEL}: label the pods prefill-decode"
            lines.append(f"{line}: {text}")


def _nodes(node: Any, path: tuple[str, ...] = ("",)) -> Iterator[tuple[yaml.Node, tuple[str, ...]]]:
    """Yield each node within one, with the keys of mappings that lead to it; items of a list share a path."""
    yield node, path
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _nodes(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item, (*path, ""))


def _end(node: yaml.Node) -> int:
    """Return the index behind a node; PyYAML's end of a block includes what follows it."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
