"""The secret of the administration port, from a file or the environment."""

import argparse
import os
from pathlib import Path

from model_server.errors import ConfigError

ADMIN_TOKEN_VARIABLE = "KVROUTE_ADMIN_TOKEN"
_ADMIN_TOKEN_CHARS_MAX = 4096


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
    source = f"${ADMIN_TOKEN_VARIABLE}" if path is None else f"--admin-token-file {path}"
    try:
        text = os.environ.get(ADMIN_TOKEN_VARIABLE, "") if path is None else path.read_text("utf-8")
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
