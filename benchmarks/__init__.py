"""Measurements that anyone can rerun; each prints one JSON object a line."""

import os

BASE_PORT = int(os.environ.get("KVROUTE_BENCH_PORT", "21000"))
"""First port of a benchmark's servers, which take up to 3,400 above it; several runs can share a machine."""
