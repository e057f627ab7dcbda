"""Filters, scorers and pickers: the weighted pipeline beside the cost policy, and what a plugin is made of.

A plugin is a class with `filter`, `score` or `pick`; see `api` and docs/plugins.md.
"""

from router.plugins.api import Endpoint, Filter, Picker, PluginRequest, PrefixMatch, Scored, Scorer

__all__ = ["Endpoint", "Filter", "Picker", "PluginRequest", "PrefixMatch", "Scored", "Scorer"]
