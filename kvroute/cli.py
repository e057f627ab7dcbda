"""The `kvroute` command: runs one of the programs, and imports nothing of the others."""

import importlib
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

# Command -> the module whose main(argv) runs it, and its purpose.
_COMMANDS = {
    "up": ("kvroute.up", "start model servers, router and Envoy on this machine and show what they do"),
    "router": (
        "router.app.server",
        "run the endpoint picker, which Envoy or another gateway calls for each request",
    ),
    "tokenizer": (
        "router.prompts.tokenizer_server",
        "tokenize for the routers of this machine in a separate process",
    ),
    "indexer": (
        "indexer.service.cli",
        "run the index of all KV caches as a service",
    ),
    "model-server": (
        "model_server.cli",
        "serve a model over an OpenAI-compatible API and publish its KV cache events",
    ),
    "top": ("kvroute.top", "show a router's pods and decisions, live"),
    "explain": ("kvroute.explain", "show which pod a request got, or would get now, and why"),
    "migrate": ("kvroute.migrate", "explain a picker configuration of llm-d, and write it in new words"),
    "doctor": ("kvroute.doctor.cli", "check router, engines and gateway, and name the remedy of each fault"),
    "plan": ("planning.cli", "compute memory, concurrency and speed of a model on GPUs"),
    "envoy-config": ("kvroute.envoy_config", "print the configuration of an Envoy that calls routers"),
    "bench": ("", "run a benchmark of a checkout"),
}
_BENCHMARKS = {
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
_ROOT = Path(__file__).parents[1]
_HELP = """\
usage: kvroute COMMAND [OPTION ...]

Routes each LLM request to the model server that will answer it first.

commands:
{lines}

  kvroute COMMAND --help   lists the options of a command
  kvroute --OPTION ...     runs the router
  kvroute --version        prints the version

  eval "$(register-python-argcomplete kvroute)"   completes commands and flags (pip install 'kvroute[cli]')
"""
_BENCH_HELP = """\
usage: kvroute bench NAME [--json] [OPTION ...]

Measures a part of kvroute; needs a checkout. --json prints one JSON object per line.

benchmarks:
{lines}

  kvroute bench NAME --help   lists the options of a benchmark
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        arguments = _complete_name()
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        return _print_help(_HELP, {name: purpose for name, (_, purpose) in _COMMANDS.items()})
    if name in ("-V", "--version"):
        print(f"kvroute {version('kvroute')}")
        return 0
    if name.startswith("--"):
        # The image may replace that of llm-d's picker, whose arguments are flags alone.
        name, arguments = "router", ["router", *arguments]
    if name not in _COMMANDS:
        print(f"kvroute: unknown command {name}; use one of {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    if name == "bench":
        return bench(arguments[1:])
    run = importlib.import_module(_COMMANDS[name][0]).main
    return int(run(arguments[1:]) or 0)


def _complete_name() -> list[str]:
    """Return the command whose flags a shell wants to complete; complete and exit if it is its name."""
    import argparse

    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    has_name = len(words) > 2 and words[1] in _COMMANDS
    if has_name:
        # The command's own parser completes what follows its name.
        os.environ["_ARGCOMPLETE"] = "2"
        if words[1] != "bench":
            return words[1:2]
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("name", choices=list(_BENCHMARKS if has_name else _COMMANDS))
    argcomplete.autocomplete(parser)
    return []


def bench(argv: Sequence[str]) -> int:
    """Run a benchmark, which only a checkout has; return the exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        return _print_help(_BENCH_HELP, _BENCHMARKS)
    if name not in _BENCHMARKS:
        known = ", ".join(_BENCHMARKS)
        print(f"kvroute bench: unknown benchmark {name}; use one of {known}", file=sys.stderr)
        return 2
    if not (_ROOT / "benchmarks" / f"{name}.py").is_file():
        print(
            "kvroute bench: benchmarks are not installed; run this in a checkout of kvroute", file=sys.stderr
        )
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
