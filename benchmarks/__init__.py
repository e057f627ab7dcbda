"""Benchmarks; each prints one JSON object per line."""

import os

BASE_PORT = int(os.environ.get("KVROUTE_BENCH_PORT", "21000"))
"""First port of a benchmark's servers, which use ports up to 999 above it."""

BENCHMARKS = {
    "keys": "block keys of a prompt",
    "index": "a match against 256 pods, memory per block, stalls of readers",
    "events": "blocks per second from published payloads to the index",
    "tokens": "token ids of a prompt",
    "pick": "a pick behind a real Envoy, by protocol",
    "pickers": "the same picks, alternating with the Go reference picker",
    "pick_inside": "the router's part of a pick, by step",
    "pick_counts": "instructions and cache misses of a pick, counted by valgrind",
    "schedule": "a scheduling cycle, from matches to the pod",
    "queues": "time to first token with each queue pricing, in simulated time",
    "replicas": "gain and cost of sharing in-flight requests among routers",
    "startup": "start of the router until it is ready",
    "engine": "the model server's engine compared with transformers and with the device's peak speeds",
    "macs": "multiply-accumulates of a generation with and without a KV cache",
}
"""Benchmarks of `kvroute bench`, each with what it measures."""
