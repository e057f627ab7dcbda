"""Command lines of `kvroute indexer` and the router: their parser, and the index's settings as flags.

Reads the file of the administration's token; opens nothing else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from indexer.config import BACKENDS, IndexerConfig
from indexer.errors import ConfigError
from indexer.tiers import DEFAULT_TIERS, DEFAULT_WEIGHTS

_SHOWN = "default: %(default)s"
_ADMIN_TOKEN_VARIABLE = "KVROUTE_ADMIN_TOKEN"
_ADMIN_TOKEN_CHARS_MAX = 4096
_Value = TypeVar("_Value")


class CommandParser(argparse.ArgumentParser):
    """Parser of a command whose errors are one line: argparse's usage text would bury them.

    Takes no abbreviated flags: one cut short could be another flag's in a later version.
    """

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line that names the error and where help is."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_index_flags(flags: argparse._ActionsContainer) -> None:
    """Adds all flags that `index_config` reads to a parser or a group of one."""
    defaults = IndexerConfig()

    def number(name: str, default: float, text: str, *, metavar: str = "N") -> None:
        kind: Any = type(default)
        flags.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} ({_SHOWN})")

    flags.add_argument(
        "--events-bind",
        metavar="ENDPOINT",
        help="tcp://*:5557 or the like: where pods connect to that publish to us, known by their topics "
        "kv@<pod>@<model> (default: we connect to the pods of the file)",
    )
    number(
        "--undeclared-pods",
        defaults.undeclared_pods,
        "most pods that connect without being in the file; 0: none",
    )
    number(
        "--first-sequence",
        defaults.first_sequence,
        "number of such a pod's first batch; 1 for llm-d's simulator",
    )
    number(
        "--bootstrap-timeout",
        defaults.bootstrap_s,
        "how long a pod's view is waited for before we are ready without it",
        metavar="SECONDS",
    )
    flags.add_argument(
        "--admin-token-file",
        type=Path,
        metavar="FILE",
        help="file with the secret that pods' administration ports ask for (label kvroute.io/admin-port); no "
        f"other port is sent it (default: ${_ADMIN_TOKEN_VARIABLE})",
    )
    flags.add_argument(
        "--backend", choices=BACKENDS, default=defaults.backend, help=f"what keeps the blocks ({_SHOWN})"
    )
    number("--block-tokens", defaults.block_tokens, "tokens of a block of the index")
    number("--capacity-blocks", defaults.capacity_blocks, "most unique blocks in the index")
    number("--capacity-bytes", defaults.capacity_bytes, "most memory of the flat backend")
    _add_identity(flags)


def _add_identity(flags: argparse._ActionsContainer) -> None:
    """What indexes that are shared or compared must have in common."""
    flags.add_argument("--redis-url", metavar="URL", help="of the redis backend's server")
    flags.add_argument(
        "--redis-namespace", default="kvroute", metavar="NAME", help=f"names there begin with it ({_SHOWN})"
    )
    flags.add_argument(
        "--hash-seed",
        type=int,
        metavar="N",
        help="seed of the block keys, the same for all peers and all that share a redis server "
        "(default: random at each start)",
    )
    flags.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="gRPC port of another indexer or router with the same --hash-seed, asked at the start for what "
        "engines do not tell; a router also follows what the others have in flight; of a name all addresses "
        "but our own; may be repeated",
    )
    for name, text in (
        ("--peer-ca", "PEM; peers must show a certificate of it (default: no TLS)"),
        ("--peer-cert", "PEM chain that is shown to peers"),
        ("--peer-key", "PEM key of --peer-cert"),
    ):
        flags.add_argument(name, type=Path, metavar="FILE", help=text)
    flags.add_argument(
        "--tier-weight",
        action="append",
        default=[],
        metavar="TIER=WEIGHT",
        help="credit of a cached block, 0..1, besides "
        + ", ".join(f"{tier}={weight}" for tier, weight in DEFAULT_WEIGHTS.items()),
    )
    flags.add_argument(
        "--medium-tier",
        action="append",
        default=[],
        metavar="MEDIUM=TIER",
        help="tier of a medium that events name, besides "
        + ", ".join(f"{medium}={tier}" for medium, tier in DEFAULT_TIERS.items()),
    )


def index_config(args: argparse.Namespace) -> IndexerConfig:
    """What the flags say.

    Raises:
        ConfigError: One is out of its range, or does not go with another.
    """
    return IndexerConfig(
        block_tokens=args.block_tokens,
        backend=args.backend,
        capacity_blocks=args.capacity_blocks,
        capacity_bytes=args.capacity_bytes,
        redis_url=args.redis_url,
        redis_namespace=args.redis_namespace,
        hash_seed=args.hash_seed,
        tier_weights={**DEFAULT_WEIGHTS, **pairs("--tier-weight", args.tier_weight, float)},
        tier_by_medium={**DEFAULT_TIERS, **pairs("--medium-tier", args.medium_tier, str)},
        events_bind=args.events_bind,
        undeclared_pods=args.undeclared_pods,
        first_sequence=args.first_sequence,
        bootstrap_s=args.bootstrap_timeout,
        admin_token=_admin_token(args.admin_token_file),
        peers=tuple(args.peer),
        peer_ca=args.peer_ca,
        peer_cert=args.peer_cert,
        peer_key=args.peer_key,
    )


def _admin_token(path: Path | None) -> str | None:
    source = f"${_ADMIN_TOKEN_VARIABLE}" if path is None else f"--admin-token-file {path}"
    try:
        text = os.environ.get(_ADMIN_TOKEN_VARIABLE, "") if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error
    token = text.strip()
    if not token and path is None:
        return None
    if not (token.isascii() and token.isprintable() and 0 < len(token) <= _ADMIN_TOKEN_CHARS_MAX):
        raise ConfigError(
            f"{source}: must hold one line of 1 to {_ADMIN_TOKEN_CHARS_MAX} printable ASCII characters"
        )
    return token


def pairs(flag: str, texts: Sequence[str], read: type[_Value]) -> dict[str, _Value]:
    """Reads NAME=VALUE arguments; a value may hold further signs.

    Raises:
        ConfigError: One is something else.
    """
    values = {}
    for text in texts:
        name, sign, value = text.partition("=")
        try:
            if not (name and sign and value):
                raise ValueError("must be NAME=VALUE")
            values[name] = read(value)  # type: ignore[call-arg]
        except ValueError as error:
            raise ConfigError(f"{flag} {text}: {error}") from None
    return values
