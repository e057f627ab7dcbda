"""preStop script that drains a model server: PORT ANNOUNCE_SECONDS TIMEOUT_SECONDS.

Routers stop picking a pod once its deletion begins; this script waits until its requests have ended. Reads
vLLM's metrics, which our engine has too. Standard library only, because it also runs in foreign images.
"""

import re
import sys
import time
import urllib.error
import urllib.request

_ACTIVE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def main(port: int, announce_s: float, timeout_s: float) -> None:
    """Wait until no request is running or queued, or until the timeout."""
    time.sleep(announce_s)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and _requests(f"http://127.0.0.1:{port}/metrics"):
        time.sleep(0.5)


def _requests(url: str) -> float:
    try:
        with urllib.request.urlopen(url, timeout=10) as page:
            return sum(float(count) for count in _ACTIVE.findall(page.read().decode()))
    except urllib.error.HTTPError:
        return 0.0  # the server has no metrics page
    except OSError as error:
        # A busy server may time out; only a refused connection means that it has ended.
        return float(not isinstance(getattr(error, "reason", error), ConnectionRefusedError))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
