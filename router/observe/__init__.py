"""Metrics, traces and the log of decisions: they wrap the core."""
