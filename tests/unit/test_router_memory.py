"""The router's heap, in a process of its own: it holds for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import ctypes, re, sys, threading
from router.memory import use_one_heap

if "one" in sys.argv:
    use_one_heap()
alloc = ctypes.CDLL(None).malloc
alloc.restype = ctypes.c_void_p
found = []
threads = [threading.Thread(target=lambda: found.append(alloc(100))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
heap = re.search(r"^([0-9a-f]+)-([0-9a-f]+) .*\\[heap\\]$", open("/proc/self/maps").read(), re.M)
low, high = (int(end, 16) for end in heap.groups())
print(sum(low <= address < high for address in found))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_threads_share_one_heap() -> None:
    """Whatever thread asks, what it gets lies in the one heap; else other threads have their own."""
    assert _in_heap("own") < 4
    assert _in_heap("one") == 4


def _in_heap(how: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    argv = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(argv, stdout=subprocess.PIPE, check=True, env=environment).stdout)
