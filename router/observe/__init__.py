"""Metrics, traces and the decision log."""
