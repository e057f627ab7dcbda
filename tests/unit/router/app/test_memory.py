"""The router's malloc settings, each tested in a process of its own because they are process-wide."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import ctypes, re, sys, threading
from router.app.process import use_single_arena

if "one" in sys.argv:
    use_single_arena()
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
    """With one arena all threads allocate from the same heap; without it, each has its own."""
    assert _in_heap("own") < 4
    assert _in_heap("one") == 4


def _in_heap(how: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    argv = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(argv, stdout=subprocess.PIPE, check=True, env=environment).stdout)


_GIVE_BACK = """
import ctypes
from pathlib import Path
from router.app.process import trim_heap, use_single_arena

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

use_single_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
flood = []
for _ in range(20_000):
    flood.append(libc.malloc(10_000))
    ctypes.memset(flood[-1], 1, 10_000)
# Small blocks that stay, so that the heap cannot shrink from its end.
kept = libc.malloc(100)
for block in flood:
    libc.free(block)
before = resident_mib()
trim_heap()
print(before, resident_mib())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_free_memory_is_returned_to_the_system() -> None:
    """After a burst that used 200 MB, most of the memory is returned to the system."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs the GNU C library")
    done = subprocess.run([sys.executable, "-c", _GIVE_BACK], stdout=subprocess.PIPE, check=True)
    before, after = map(int, done.stdout.split())
    assert before - after > 100
