"""Holds a conversation of three turns and checks that it stuck to one pod: URL MODEL TIMEOUT_SECONDS.

Stuck means that the gateway names the same pod each time (x-kvroute-pod), where it does, and that the later
turns' prompts were found in a cache. Standard library only.
"""

import json
import sys
import time
import urllib.error
import urllib.request

_TEXT = "The harbour master keeps a ledger of every ship, its cargo and the weather it met. " * 12
_TURNS = (_TEXT + "What does he keep?", "Which of it matters in a storm?", "And in a calm?")


def main(url: str, model: str, timeout_s: float) -> int:
    """Returns the exit status."""
    deadline_s = time.monotonic() + timeout_s
    messages: list[dict[str, str]] = []
    pods, cached = [], []
    for turn in _TURNS:
        messages.append({"role": "user", "content": turn})
        pod, answer = _ask(url, {"model": model, "messages": messages, "max_tokens": 16}, deadline_s)
        usage = answer["usage"]
        pods.append(pod)
        cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        prompt_tokens = usage["prompt_tokens"]
        print(f"turn {len(pods)}: {pod or 'a pod'}, {cached[-1]} of {prompt_tokens} prompt tokens cached")
    if len(set(pods)) > 1:
        moves = ", ".join(map(str, pods))
        print(f"it moved between model servers: {moves}; see /debug/decisions of the router")
        return 1
    if not all(cached[1:]):
        print("a later turn met an empty cache: do the router's streams say EXACT (/debug/pods)?")
        return 1
    print("the conversation stuck")
    return 0


def _ask(url: str, body: object, deadline_s: float) -> tuple[str | None, dict]:
    """Asks until there is an answer: the release may have been installed a moment ago."""
    url = f"{url.rstrip('/')}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, deadline_s - time.monotonic())) as response:
                return response.headers.get("x-kvroute-pod"), json.load(response)
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read()[:500].decode(errors='replace')}"
            if error.code < 500:
                raise SystemExit(f"{url} answered {problem}") from None
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{url}: no answer in time; last: {problem}")
        print(f"waiting: {problem}", flush=True)
        time.sleep(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
