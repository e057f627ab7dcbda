"""The `kvroute` command: picks the program and hands it the rest of the command line; loads nothing else."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

# Command -> the module whose main(argv) runs it, and what it is for.
_COMMANDS = {
    "up": ("kvroute.up", "start model servers, router and Envoy on this machine and show what they do"),
    "router": ("router.app.server", "run the endpoint picker: Envoy or any gateway asks it which pod to use"),
    "tokenizer": (
        "router.prompts.tokenizer_server",
        "tokenize for routers on this machine, in a process of its own",
    ),
    "indexer": (
        "indexer.service.cli",
        "run the index of what every model server's KV cache holds on its own",
    ),
    "model-server": (
        "model_server.cli",
        "run a model behind an OpenAI-compatible API, telling what its cache holds",
    ),
    "plan": ("planning.cli", "tell what a model can hold and how fast it can be on some GPUs"),
    "bench": ("", "measure keys, index, events, tokens, picks or the engine; needs a checkout"),
}
_BENCHMARKS = {
    "keys": "block keys of a prompt",
    "index": "a match against 256 pods, memory of a block, stalls of readers",
    "events": "blocks per second from published payloads to the index",
    "tokens": "token ids of a prompt",
    "pick": "a pick behind a real Envoy, door by door",
    "pickers": "the same picks beside the Go reference's, in turns",
    "pick_inside": "the router's own part of a pick, step by step",
    "pick_counts": "its instructions and cache misses, counted by valgrind",
    "schedule": "a scheduling cycle, from matches to the pod",
    "queues": "first tokens behind each way to price a queue, in virtual time",
    "replicas": "what several routers lose alone, and what sharing their ledgers brings and costs",
    "startup": "the router's start until it is ready",
    "engine": "the model server's engine beside transformers",
    "macs": "multiply-accumulates of a generation with and without a KV cache",
}
_ROOT = Path(__file__).parents[1]
_HELP = """\
usage: kvroute COMMAND [OPTION ...]

Routes each LLM request to the model server that will answer it first.

commands:
{lines}

  kvroute COMMAND --help   tells a command's options
  kvroute --version        tells the version
"""
_BENCH_HELP = """\
usage: kvroute bench NAME [--json] [OPTION ...]

Measures a part of kvroute; needs a checkout. --json prints one JSON object a line.

benchmarks:
{lines}

  kvroute bench NAME --help   tells a benchmark's options
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        return _print_help(_HELP, {name: purpose for name, (_, purpose) in _COMMANDS.items()})
    if name in ("-V", "--version"):
        print(f"kvroute {version('kvroute')}")
        return 0
    if name not in _COMMANDS:
        print(f"kvroute: no such command: {name}; there are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    if name == "bench":
        return bench(arguments[1:])
    run = importlib.import_module(_COMMANDS[name][0]).main
    return int(run(arguments[1:]) or 0)


def bench(argv: Sequence[str]) -> int:
    """Runs a benchmark of a checkout with the rest of the command line; returns its exit status.

    They are for who changes kvroute, and no part of an installed one.
    """
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        return _print_help(_BENCH_HELP, _BENCHMARKS)
    if name not in _BENCHMARKS:
        known = ", ".join(_BENCHMARKS)
        print(f"kvroute bench: no such benchmark: {name}; there are {known}", file=sys.stderr)
        return 2
    if not (_ROOT / "benchmarks" / f"{name}.py").is_file():
        print("kvroute bench: needs a checkout of kvroute: benchmarks are not installed", file=sys.stderr)
        return 1
    sys.path.insert(0, str(_ROOT))
    sys.argv = [f"kvroute bench {name}", *argv[1:]]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


def _print_help(text: str, purposes: Mapping[str, str]) -> int:
    width = max(map(len, purposes))
    lines = "\n".join(f"  {name:<{width}}   {purpose}" for name, purpose in purposes.items())
    print(text.format(lines=lines), end="")
    return 0
