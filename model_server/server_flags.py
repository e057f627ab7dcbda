"""Flags of the model server's HTTP side: where it listens, what it is called, and the secrets it asks for.

Reads the file of the administration's token; opens nothing else.
"""

import argparse
import os
from pathlib import Path

from model_server.errors import ConfigError

_API_KEY_VARIABLE = "KVROUTE_API_KEY"
_ADMIN_TOKEN_VARIABLE = "KVROUTE_ADMIN_TOKEN"
_ADMIN_TOKEN_CHARS_MAX = 4096
_MAX_BODY_BYTES = 16 << 20


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the HTTP side: ports, names, limits and secrets."""
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="port to listen on; 0 lets the system choose (default: %(default)s)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names the API knows the model by (default: the tiny model's name, or the directory's)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=positive,
        default=_MAX_BODY_BYTES,
        metavar="N",
        help="refuse larger HTTP bodies (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        default=os.environ.get(_API_KEY_VARIABLE) or None,
        metavar="KEY",
        help=f"refuse API requests without it (default: ${_API_KEY_VARIABLE}, which other users cannot read)",
    )
    group.add_argument(
        "--admin-port",
        type=_port,
        metavar="PORT",
        help="port of administration (sleep, cache reset, adapters) and snapshots, none of which the serving "
        "port answers; 0 lets the system choose (default: they are not served)",
    )
    group.add_argument(
        "--admin-token-file",
        type=Path,
        metavar="FILE",
        help="file with the secret that requests to --admin-port must carry as Authorization: Bearer SECRET "
        f"(default: ${_ADMIN_TOKEN_VARIABLE}; without either everybody is let in who reaches the port)",
    )
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let operators load adapters from this machine's directories at --admin-port (default: they may "
        "not)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much to log (default: %(default)s)",
    )


def admin_token(args: argparse.Namespace) -> str | None:
    """Return the secret of the administration port; None if there is none.

    Raises:
        ConfigError: It cannot be read or sent, or has no port to guard.
    """
    if args.admin_port and args.admin_port == args.port:
        raise ConfigError(f"--admin-port {args.admin_port}: is the serving port; choose another one")
    path: Path | None = args.admin_token_file
    if path is not None and args.admin_port is None:
        raise ConfigError("--admin-token-file: needs --admin-port")
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


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port (0 to 65535)")
    return port


def positive(text: str) -> int:
    """Read a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
