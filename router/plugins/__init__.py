"""Configurable pipeline of filters, scorers and pickers, an alternative to the default cost policy.

A plugin is a class with `filter`, `score` or `pick`; see `api` and docs/plugins.md.
"""

from router.plugins.api import Endpoint, Filter, Picker, PluginRequest, PrefixMatch, Scored, Scorer

__all__ = ["Endpoint", "Filter", "Picker", "PluginRequest", "PrefixMatch", "Scored", "Scorer"]
