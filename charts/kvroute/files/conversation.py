"""Test of a release by a conversation of three turns that must stay at one pod: URL MODEL TIMEOUT_SECONDS.

It passes if the gateway reports the same pod for each turn (header x-kvroute-pod, where it has one) and the
later turns have cached tokens. Prints what it waits for. Standard library only.
"""

import http.client
import json
import socket
import sys
import time
import urllib.error
import urllib.request

_TEXT = "The harbour master keeps a ledger of every ship, its cargo and the weather it met. " * 12
_TURNS = (_TEXT + "What does he keep?", "Which of it matters in a storm?", "And in a calm?")
_POLL_S = 2.0
# Interval in which an unchanged problem is printed again.
_PRINT_EVERY_S = 10.0
# Consecutive failed DNS lookups after which the host name counts as wrong.
_UNKNOWN_NAMES_MAX = 3


def main(url: str, model: str, timeout_s: float) -> int:
    """Run the conversation; return the exit status."""
    if not url:
        _say("not tested: in gateway mode the chart does not know where the Gateway is reached")
        _say("set it: helm upgrade --reuse-values --set test.url=http://HOST[:PORT] ...")
        return 1
    _say(f"a conversation of {len(_TURNS)} turns with {model} at {url}; waits at most {timeout_s:g} s")
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
        _say(f"turn {len(pods)}: {pod or 'a pod'}, {cached[-1]} of {prompt_tokens} prompt tokens cached")
    if len(set(pods)) > 1:
        moves = ", ".join(map(str, pods))
        _say(f"it moved between model servers: {moves}; see /debug/decisions of the router")
        return 1
    if not all(cached[1:]):
        _say("a later turn met an empty cache: do the router's streams say EXACT (/debug/pods)?")
        return 1
    _say("the conversation stuck")
    return 0


def _ask(url: str, body: object, deadline_s: float) -> tuple[str | None, dict]:
    """Send a request until it succeeds: the release may still be starting. Return pod and response."""
    url = f"{url.rstrip('/')}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    started_s, printed_s, printed, unknown_names = time.monotonic(), 0.0, "", 0
    while True:
        unknown = False
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, deadline_s - time.monotonic())) as response:
                return response.headers.get("x-kvroute-pod"), json.load(response)
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.read()[:500].decode(errors='replace')}"
            if error.code < 500:
                raise SystemExit(f"{url} answered {problem}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None)
            unknown = isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME
            problem = str(error)
        unknown_names = unknown_names + 1 if unknown else 0
        now_s = time.monotonic()
        if unknown_names == _UNKNOWN_NAMES_MAX:
            raise SystemExit(f"{url}: no such host: {problem}; is the Service there, is test.url right?")
        if now_s > deadline_s:
            raise SystemExit(
                f"{url}: no answer in time; last: {problem}; are the pods Ready (kubectl get pods), and what "
                "does the router see (/debug/discovery on its port 9090)?"
            )
        if problem != printed or now_s - printed_s >= _PRINT_EVERY_S:
            _say(f"waiting for {now_s - started_s:.0f} s: {problem}")
            printed_s, printed = now_s, problem
        time.sleep(_POLL_S)


def _say(text: str) -> None:
    """Print a line unbuffered, so that `kubectl logs --follow` shows it at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
