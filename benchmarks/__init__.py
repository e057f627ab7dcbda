"""Measurements that anyone can rerun; each prints one JSON object a line."""
