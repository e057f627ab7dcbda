"""Where the servers of a benchmark listen: above one port, so that several runs can share a machine."""

from __future__ import annotations

import os

BASE_PORT = int(os.environ.get("KVROUTE_BENCH_PORT", "21000"))
"""First of the ports; KVROUTE_BENCH_PORT names another one. Up to 3,400 above it are used."""
