"""The `kvroute` command: picks the program and hands it the rest of the command line; loads nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

# Command -> the module whose main(argv) runs it, and what it is for.
_COMMANDS = {
    "up": ("router.local.up", "start model servers, router and Envoy on this machine and show what they do"),
    "router": ("router.server", "run the endpoint picker: Envoy or any gateway asks it which pod to use"),
    "tokenizer": ("router.tokenizer_server", "tokenize for routers on this machine, in a process of its own"),
    "indexer": ("indexer.cli", "run the index of what every model server's KV cache holds on its own"),
    "model-server": (
        "model_server.cli",
        "run a model behind an OpenAI-compatible API, telling what its cache holds",
    ),
    "plan": ("model_server.plan.cli", "tell what a model can hold and how fast it can be on some GPUs"),
    "bench": ("router.bench", "measure keys, index, events, tokens, picks or the engine; needs a checkout"),
}
_HELP = """\
usage: kvroute COMMAND [OPTION ...]

Routes each LLM request to the model server that will answer it first.

commands:
{commands}

  kvroute COMMAND --help   tells a command's options
  kvroute --version        tells the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if name in ("-V", "--version"):
        print(f"kvroute {version('kvroute')}")
        return 0
    if name not in _COMMANDS:
        print(f"kvroute: no such command: {name}; there are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = _COMMANDS[name]
    run = importlib.import_module(module).main
    return int(run(arguments[1:]) or 0)


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = (f"  {name:<{width}}   {purpose}" for name, (_, purpose) in _COMMANDS.items())
    return _HELP.format(commands="\n".join(lines))
