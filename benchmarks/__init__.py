"""Benchmarks; each prints one JSON object per line."""

import os

BASE_PORT = int(os.environ.get("KVROUTE_BENCH_PORT", "21000"))
"""First port of a benchmark's servers, which use up to 3,400 ports above it."""
