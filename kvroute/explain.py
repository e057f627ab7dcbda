"""The `kvroute explain` command: which pod a request got, or would get now, and why, in seconds."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.flags import CommandParser, add_flags, flag_values, pair
from kvroute.router_pages import RouterPages
from kvroute.terminal import BOLD, YELLOW, clean, count, styled, table

# Parts of a candidate's cost in seconds, which add up to it.
_PARTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "queue s": lambda one: one["queued_prefill_s"],
    "prefill s": lambda one: one["own_prefill_s"] * one["own_weight"],
    "copies s": lambda one: one["copy_s"],
    "KV pressure s": lambda one: one["kv_pressure_s"],
    "other s": lambda one: one["extra_s"],
}

_ENDS = "prefill_end", "end"
_STYLES = {"pod": BOLD, "degraded": YELLOW, "broken": YELLOW}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    arguments = _parser().parse_args(argv)
    is_sent = arguments.request_id is not None
    pages = RouterPages(**flag_values(RouterPages, arguments))
    if is_sent:
        record = pages.decision(arguments.request_id)
    else:
        record = pages.get("/debug/explain", _asked(pages, arguments))
    drafters = pages.get("/ready").get("drafters", ())
    if arguments.json:
        print(json.dumps(record, indent=1))
    else:
        print("\n".join(report(record, drafters, is_sent=is_sent, now_s=time.time())))
    return 0


def _parser() -> argparse.ArgumentParser:
    made = CommandParser(
        "kvroute explain",
        "Show which pod a request got, or would get now, and why. A request that is only explained reserves, "
        "records and changes nothing, and goes through the parsers, rewrites and salts of ext_proc.",
    )
    wanted = made.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--request-id", metavar="ID", help="a routed request: x-request-id of its response")
    what = "JSON list of messages, or a whole request body; -: stdin"
    wanted.add_argument("--messages", type=Path, metavar="FILE", help=what)
    wanted.add_argument("--prompt", metavar="TEXT", help="prompt of a completion")
    made.add_argument("--model", help="model, where the body names none (default: the router's only one)")
    made.add_argument("--path", help="path of the request (default: the API whose body it is)")
    what = "header that matters to the pick, as of a session or tenant; may be repeated"
    made.add_argument("--header", type=pair(str), action="append", metavar="NAME=VALUE", help=what)
    made.add_argument("--pool", help="InferencePool, of a router with several (default: its first)")
    made.add_argument("--json", action="store_true", help="print the record as JSON")
    add_flags(made, RouterPages)
    return made


def _asked(pages: RouterPages, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request to explain, as the page takes it."""
    body: Any = {"prompt": arguments.prompt}
    if (file := arguments.messages) is not None:
        try:
            body = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: not JSON: {error}") from error
        body = {"messages": body} if isinstance(body, list) else body
    if not isinstance(body, dict):
        raise ValueError(f"{file}: expected a list of messages or a request body")
    if arguments.model is not None or "model" not in body:
        body["model"] = arguments.model or _only_model(pages)
    apis = {"prompt": "/v1/completions", "input": "/v1/responses"}
    path = next((apis[name] for name in apis if name in body), "/v1/chat/completions")
    headers, pool = dict(arguments.header or ()), arguments.pool or ""
    return {"path": arguments.path or path, "body": body, "headers": headers, "pool": pool}


def _only_model(pages: RouterPages) -> str:
    models = sorted({pod["base_model"] for pod in pages.get("/debug/pods")["pods"] if pod["base_model"]})
    if len(models) != 1:
        known = ", ".join(map(clean, models)) or "-"
        raise ValueError(f"--model: the body names none; the router's: {known}")
    return str(models[0])


def report(
    record: Mapping[str, Any], drafters: Sequence[str], *, is_sent: bool, now_s: float
) -> Iterator[str]:
    """Yield the lines that explain a decision record.

    Args:
        drafters: Lines of /ready, one per engine with a drafter.
        is_sent: Whether the request was routed; False for one that is only explained.
        now_s: Unix time.
    """
    pod, degraded, broken = record["pod"], record["degraded"], record.get("prefix_break")
    delivered, evicted_s = record["delivered_cached_tokens"], record["evicted_s_ago"]
    when = f"{max(0.0, now_s - record['time']):,.0f} s ago" if is_sent else "if it came now"
    causes = (f"{count(tokens)} {cause}" for cause, tokens in record["tokens_by_cause"].items())
    ago = "" if evicted_s is None else f" ({evicted_s:,.0f} s ago)"
    told = f", delivered {count(delivered)}" * (delivered is not None)
    asked = f"{record['kind']} of {record['model']}, {count(record['prompt_tokens'])} tokens, {when}"
    mine = [line.partition(": ")[2] for line in drafters if re.match(rf"pod={re.escape(pod)}[:@]", line)]
    facts = [
        ("request", asked),
        ("pod", f"{pod} {record['pod_name']}"),
        ("why", record["reason"]),
        ("degraded", degraded and f"by load alone: {degraded}; no cache was looked at"),
        ("partial", record["partial"]),
        ("prefill", record["prefill_pod"]),
        ("session", record["session_pod"]),
        ("cached", f"predicted {count(record['predicted_cached_tokens'])}{told}"),
        ("tokens", ", ".join(causes) + ago),
        *(("drafter", line) for line in mine),
        ("broken", broken and _broken(broken)),
        *((what, f"after {end['after_s']:.3f} s") for what in _ENDS if (end := record[what])),
    ]
    for head, text in facts:
        if text:
            yield styled(f"{head:<13}{clean(text, 500)}".rstrip(), _STYLES.get(head, ""))
    yield ""
    yield from _candidates(record)


def _broken(broken: Mapping[str, Any]) -> str:
    message = "an unknown message" if broken["message"] is None else f"message {broken['message']}"
    lost = f"{count(broken['lost_tokens'])} tokens lost, {broken['lost_s']:.3f} s"
    return f"{broken['part']}: {message}, token {count(broken['offset_tokens'])}: {lost}"


def _candidates(record: Mapping[str, Any]) -> Iterator[str]:
    candidates, scored = record["candidates"], any(one["score"] is not None for one in record["candidates"])
    heads = ["pod", "view", *["score"] * scored, "cost s", *_PARTS, "cached", "from host", "in flight"]
    rows = [
        [
            *(one["pod"], one["view"], *[f"{one['score'] or 0.0:.3f}"] * scored, f"{one['cost_s']:.4f}"),
            *(f"{part(one):.4f}" for part in _PARTS.values()),
            *(count(one[name]) for name in ("cached_tokens", "host_tokens")),
            count(one["awaiting"] + one["decoding"]),
        ]
        for one in candidates
    ]
    head, *lines = table(heads, rows, words=(0, 1))
    yield f"  {head}"
    for one, line in zip(candidates, lines, strict=True):
        yield styled(f"> {line}", BOLD) if one["pod"] == record["pod"] else f"  {line}"
    for one in record["excluded"]:
        yield f"  {clean(one['pod'])}: not a candidate: {clean(one['reason'])}"
