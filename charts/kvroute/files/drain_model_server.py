"""Lets a model server end without a failed request: PORT ANNOUNCE_SECONDS TIMEOUT_SECONDS.

Routers hear of a pod's end at once and pick it no more; what it has still to answer gets its time. Reads
vLLM's metrics, which ours has, too. Standard library only, for images that are not ours.
"""

import re
import sys
import time
import urllib.error
import urllib.request

_ACTIVE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def main(port: int, announce_s: float, timeout_s: float) -> None:
    """Waits until nothing is running or waiting, or the time is up."""
    time.sleep(announce_s)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and _requests(f"http://127.0.0.1:{port}/metrics"):
        time.sleep(0.5)


def _requests(url: str) -> float:
    try:
        with urllib.request.urlopen(url, timeout=10) as page:
            return sum(float(count) for count in _ACTIVE.findall(page.read().decode()))
    except urllib.error.HTTPError:
        return 0.0  # it does not tell
    except OSError as error:
        # A busy server may be late with its page; who listens no more has nothing left to answer.
        return float(not isinstance(getattr(error, "reason", error), ConnectionRefusedError))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
