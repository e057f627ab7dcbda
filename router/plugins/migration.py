"""What a picker configuration of llm-d means here, and the same configuration in the words of llm-d v0.11.

The meanings, and what is ignored, are those of the loader. Changes are spliced into the text, so that
comments outside of changed entries are kept. A file in flow style (JSON), or with aliases, is printed anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from io import StringIO
from typing import Any

import yaml

from indexer import IndexerConfig
from router.config.fields import Section
from router.config.picker_file import PickerConfig, PluginEntry, parse_config
from router.errors import ConfigError
from router.plugins.build import REMOVED, ignored_parameters, meaning
from router.plugins.labels import ByLabelFilter
from router.plugins.producer_settings import apply_producer_settings, tokenizer_sources
from router.plugins.profiles import DisaggHandlerSettings, PdHandlerSettings
from router.plugins.scorers import PRECISE, PRODUCER_KEY
from router.pods.pod_set import ROLE_LABEL

_GROUP, _OLD_GROUP = "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"
_HANDLERS = {"pd-profile-handler": PdHandlerSettings, "disagg-profile-handler": DisaggHandlerSettings}
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
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")


@dataclass(eq=False)
class Migration:
    """Findings about a configuration, and the changes to it."""

    config: PickerConfig
    source: str  # text of the file
    lines: list[str] = field(default_factory=list)  # findings with file, line and place
    problems: int = 0  # findings that keep the router from starting
    # Changes: a list, the place of an item in it and what replaces that; scalars and new values.
    items: list[tuple[yaml.SequenceNode, int, list[Any]]] = field(default_factory=list)
    scalars: list[tuple[yaml.ScalarNode, str]] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return len(self.items) + len(self.scalars)

    @property
    def keeps_comments(self) -> bool:
        """Return whether comments outside of changed entries are kept."""
        in_flow = any(container.flow_style for container, _, _ in self.items)
        return not in_flow and not any(isinstance(one, yaml.AliasToken) for one in yaml.scan(self.source))

    def text(self) -> str:
        """Return the file in new words; call it once, as it may change the parsed file."""
        if not self.keeps_comments:
            return self._printed()
        edits = [(node.start_mark.index, node.end_mark.index, value) for node, value in self.scalars]
        edits += [self._splice(*item) for item in self.items]
        text = self.source
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _splice(self, container: yaml.SequenceNode, at: int, new: list[Any]) -> tuple[int, int, str]:
        """Return start, end and new text of an item of a block list."""
        text, item = self.source, container.value[at]
        start, end = text.rindex("-", 0, item.start_mark.index), _end(item)
        line = text.rfind("\n", 0, start) + 1
        if not new:
            return line, (text.find("\n", end) + 1) or len(text), ""
        printed = yaml.safe_dump(new, sort_keys=False).rstrip().replace("\n", "\n" + " " * (start - line))
        return start, end, printed

    def _printed(self) -> str:
        for node, value in self.scalars:
            node.value = value
        for container, at, new in sorted(self.items, key=lambda item: -item[1]):
            container.value[at : at + 1] = yaml.SafeDumper(StringIO()).represent_data(new).value
        return yaml.serialize(self.config.section.node, Dumper=yaml.SafeDumper)


def migrate(text: str, source: str) -> Migration:
    """Examine a configuration; `source` names it in the findings.

    Raises:
        ConfigError: The text is no picker configuration, or a section other than the plugins is invalid.
    """
    migration = Migration(parse_config(text, source), text)
    for entry in migration.config.entries:
        _examine(migration, entry)
    _examine_sections(migration)
    if not migration.problems:
        migration.lines += ignored_parameters(migration.config)
        migration.lines += _flags(migration.config)
    migration.lines.sort(key=_line_number)
    return migration


def _examine(migration: Migration, entry: PluginEntry) -> None:
    """Add the findings and changes of one plugin."""
    try:
        told = meaning(entry)
    except ConfigError as error:
        migration.problems += 1
        migration.lines.append(f"{error} [not supported here]")
        return
    place = entry.section.location("")
    migration.lines.append(f"{place}: {entry.type}: {told}")
    new = _new_entries(migration, entry)
    if (instead := REMOVED.get(entry.type)) is not None:
        kept = "" if new is not None else "; no label selector says the same, so the entry is left as it is"
        migration.lines.append(f"{place}: {entry.type}: llm-d v0.11 removes it; there: {instead}{kept}")
    elif new is not None:
        migration.lines.append(f"{place}: {entry.type}: llm-d v0.11 removes its flat parameters")
    if new is None:
        return
    plugins: Any = migration.config.section.at("plugins").node
    migration.items.append((plugins, migration.config.entries.index(entry), new))
    if not new:
        _drop_references(migration, entry.name)


def _new_entries(migration: Migration, entry: PluginEntry) -> list[dict[str, Any]] | None:
    """Return the entries that replace one in new words; None if it stays as it is."""
    old, section = entry.section.value(), entry.parameters_section
    scalars = Counter(node.value for node in _scalars(migration.config.section.node))
    # Others may name the plugin by its old type.
    others = scalars[entry.name] > ("type" in old and old["type"] == entry.name) + ("name" in old)
    name = {"name": entry.name} if "name" in old or others else {}
    if (renamed := _RENAMED.get(entry.type)) is not None:
        return [{"type": renamed, **name, **_given(old, "parameters")}]
    if (handler := _HANDLERS.get(entry.type)) is not None:
        return _new_handler(entry, section.read(handler), name)
    if entry.type == "by-label":
        label = section.read(ByLabelFilter)
        if label.valid_values and label.allows_no_label:
            return None
        values = {"operator": "In", "values": list(label.valid_values)}
        expression = {"key": label.label, **(values if label.valid_values else {"operator": "DoesNotExist"})}
        return [{"type": "label-selector-filter", **name, "parameters": {"matchExpressions": [expression]}}]
    if entry.type == "precise-prefix-cache-scorer":
        return _new_precise(migration, entry, _given(old, "parameters"))
    return [] if entry.type in REMOVED else None


def _new_handler(
    entry: PluginEntry, read: DisaggHandlerSettings, name: dict[str, str]
) -> list[dict[str, Any]] | None:
    given = entry.parameters_section.value()
    kept = {key: given[key] for key in ("stageOrder", "primaryPort") if key in given}
    stages = {key: getattr(read.profiles, key) for key in ("decode", "prefill", "encode")}
    deciders = {key: getattr(read.deciders, key) for key in ("prefill", "encode")}
    groups = {"profiles": {key: value for key, value in stages.items() if value != key}}
    groups["deciders"] = {key: value for key, value in deciders.items() if value}
    parameters = kept | {key: group for key, group in groups.items() if group}
    if entry.type in REMOVED or given.keys() - {"stageOrder", "primaryPort", "profiles", "deciders"}:
        return [
            {"type": "disagg-profile-handler", **name, **_given({"parameters": parameters}, "parameters")}
        ]
    return None


def _new_precise(
    migration: Migration, entry: PluginEntry, parameters: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a producer, named instead of the entry where that is read, and a scorer by the entry's name."""
    name = f"{entry.name}-producer" if PRECISE in migration.config.plugins else PRECISE
    for node, path in _paths(migration.config.section.node):
        is_producer = path[-1] == PRODUCER_KEY or "extractors" in path
        if is_producer and isinstance(node, yaml.ScalarNode) and node.value == entry.name:
            migration.scalars.append((node, name))
    own = {"name": name} if name != PRECISE else {}
    scorer = {"type": "prefix-cache-scorer", "name": entry.name, "parameters": {PRODUCER_KEY: name}}
    return [{"type": PRECISE, **own, **parameters}, scorer]


def _drop_references(migration: Migration, name: str) -> None:
    for node, path in _paths(migration.config.section.node):
        if path[-1] == "plugins" and len(path) > 1 and isinstance(node, yaml.SequenceNode):
            for at, item in enumerate(node.value):
                if Section("", "", item).value().get("pluginRef") == name:
                    migration.items.append((node, at, []))


def _examine_sections(migration: Migration) -> None:
    """Add the findings and changes outside of the plugins."""
    root: Any = migration.config.section.node
    located = migration.config.section.location
    for key, value in root.value:
        if (told := _SECTIONS.get(key.value)) is not None:
            migration.lines.append(f"{located(key.value, at_key=True)}: {told}")
        if key.value == "apiVersion" and value.value == _OLD_GROUP:
            migration.lines.append(f"{located('apiVersion')}: the old name of {_GROUP}")
            migration.scalars.append((value, _GROUP))
    for node in _scalars(root):
        if node.value == "both":
            line = node.start_mark.line + 1
            text = f"llm-d v0.11 removes the value `both` of {ROLE_LABEL}: label the pods prefill-decode"
            migration.lines.append(f"{migration.config.section.source}:{line}: {text}")


def _flags(config: PickerConfig) -> Iterator[str]:
    """Yield the flags of the router that the producers' parameters stand for."""
    plain, source = IndexerConfig(), config.section.source
    index, _ = apply_producer_settings(config, plain, None)
    for one in fields(index):
        value = getattr(index, one.name)
        if value != getattr(plain, one.name) and "names" in one.metadata:
            yield f"{source}: the plugins set {one.metadata['names'][0]} to {value}"
    for model, where in tokenizer_sources(config).items():
        yield f"{source}: the plugins set --tokenizer {model}={where}"


def _given(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {key: values[key]} if values.get(key) else {}


def _paths(node: Any, path: tuple[str, ...] = ("",)) -> Iterator[tuple[yaml.Node, tuple[str, ...]]]:
    """Yield each node below one with the keys that lead to it."""
    yield node, path
    is_mapping = isinstance(node, yaml.MappingNode)
    for one in node.value if isinstance(node, yaml.CollectionNode) else ():
        inner = (one[1], (*path, str(one[0].value))) if is_mapping else (one, path)
        yield from _paths(*inner)


def _scalars(node: yaml.Node | None) -> list[yaml.ScalarNode]:
    return [one for one, _ in _paths(node) if isinstance(one, yaml.ScalarNode)]


def _end(node: yaml.Node) -> int:
    """Return the index behind a node; PyYAML's end of a block includes what follows it."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_number(line: str) -> int:
    """Return the line that a finding names; findings about the whole file come last."""
    found = re.search(r":(\d+): ", line)
    return int(found[1]) if found else 1 << 30
