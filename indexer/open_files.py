"""How many files the process may have open: the soft limit, raised as far as the hard one allows."""

from __future__ import annotations

import resource

# Sockets, their signallers and monitors of some thousand pods.
_OPEN_FILES = 65_536


def raise_open_files() -> None:
    """Each followed pod needs about five open files, far more than the usual soft limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
