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
# Commands whose errors are their user's; a server reports its own, and what else it raises needs a traceback.
_ERRORS = dict.fromkeys(("up", "top", "explain", "migrate"), (OSError, ValueError))
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
    try:
        return int(run(arguments[1:]) or 0)
    except KeyboardInterrupt:
        return 0
    except _ERRORS.get(name, ()) as error:
        print(f"kvroute {name}: error: {error}", file=sys.stderr)
        return 1


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
    parser.add_argument("name", choices=list(_benchmarks() if has_name else _COMMANDS))
    argcomplete.autocomplete(parser)
    return []


def _benchmarks() -> dict[str, str]:
    """Return what each benchmark measures, by name; empty outside of a checkout."""
    if not (_ROOT / "pyproject.toml").is_file():
        return {}
    sys.path.insert(0, str(_ROOT))
    return dict(importlib.import_module("benchmarks").BENCHMARKS)


def bench(argv: Sequence[str]) -> int:
    """Run a benchmark, which only a checkout has; return the exit status."""
    name, known = argv[0] if argv else "--help", _benchmarks()
    if not known:
        print("kvroute bench: benchmarks are not installed; use a checkout of kvroute", file=sys.stderr)
        return 1
    if name in ("-h", "--help"):
        return _print_help(_BENCH_HELP, known)
    if name not in known:
        print(f"kvroute bench: unknown benchmark {name}; use one of {', '.join(known)}", file=sys.stderr)
        return 2
    sys.argv = [f"kvroute bench {name}", *argv[1:]]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


def _print_help(text: str, purposes: Mapping[str, str]) -> int:
    width = max(map(len, purposes))
    lines = "\n".join(f"  {name:<{width}}   {purpose}" for name, purpose in purposes.items())
    print(text.format(lines=lines), end="")
    return 0
