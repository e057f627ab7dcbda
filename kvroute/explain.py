"""The `kvroute explain` command: which pod a request got, or would get now, and why, in seconds."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.flags import CommandParser, add_flags, pair
from kvroute.router_pages import PagesError, PagesOptions, RouterPages
from kvroute.terminal import BOLD, YELLOW, clean, count, styled, table

# Parts of a candidate's cost in seconds, which add up to it.
_PARTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "queue s": lambda one: one["queued_prefill_s"],
    "prefill s": lambda one: one["own_prefill_s"] * one["own_weight"],
    "copies s": lambda one: one["copy_s"],
    "KV pressure s": lambda one: one["kv_pressure_s"],
    "other s": lambda one: one["extra_s"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    arguments = _parser().parse_args(argv)
    is_sent = arguments.request_id is not None
    try:
        pages = RouterPages(arguments)
        if is_sent:
            record = _recorded(pages, arguments.request_id)
        else:
            record = pages.get("/debug/explain", _asked(pages, arguments))
        drafters = pages.get("/ready").get("drafters", ())
    except (PagesError, ValueError, OSError) as error:
        print(f"kvroute explain: error: {error}", file=sys.stderr)
        return 1
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
    wanted.add_argument(
        "--messages",
        type=Path,
        metavar="FILE",
        help="JSON list of messages, or a whole request body; -: stdin",
    )
    wanted.add_argument("--prompt", metavar="TEXT", help="prompt of a completion")
    made.add_argument("--model", help="model, where the body names none (default: the router's only one)")
    made.add_argument("--path", help="path of the request (default: the API whose body it is)")
    made.add_argument(
        "--header",
        type=pair(str),
        action="append",
        metavar="NAME=VALUE",
        help="header of the request that matters to the pick, as of a session or tenant; may be repeated",
    )
    made.add_argument("--pool", help="InferencePool, of a router with several (default: its first)")
    made.add_argument("--json", action="store_true", help="print the record as JSON")
    add_flags(made, PagesOptions)
    return made


def _recorded(pages: RouterPages, request_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = pages.get(f"/debug/decisions?request_id={quote(request_id, safe='')}")[
        "decisions"
    ]
    if not found:
        raise PagesError(
            f"the router has no record of request {clean(request_id)}: it keeps the latest 1,000, and each "
            "router its own"
        )
    return found[0]


def _asked(pages: RouterPages, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request to explain, as the page takes it."""
    if arguments.prompt is not None:
        body: Any = {"prompt": arguments.prompt}
    else:
        text = sys.stdin.read() if str(arguments.messages) == "-" else arguments.messages.read_text("utf-8")
        try:
            body = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{arguments.messages}: not JSON: {error}") from error
    body = {"messages": body} if isinstance(body, list) else body
    if not isinstance(body, dict):
        raise ValueError(f"{arguments.messages}: expected a list of messages or a request body")
    if arguments.model is not None or "model" not in body:
        body = {"model": arguments.model or _only_model(pages), **body, **_given(model=arguments.model)}
    apis = {"prompt": "/v1/completions", "input": "/v1/responses"}
    path = next((apis[name] for name in apis if name in body), "/v1/chat/completions")
    path, headers = arguments.path or path, dict(arguments.header or ())
    return {"path": path, "body": body, "headers": headers, **_given(pool=arguments.pool)}


def _given(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def _only_model(pages: RouterPages) -> str:
    models = sorted({pod["base_model"] for pod in pages.get("/debug/pods")["pods"] if pod["base_model"]})
    if len(models) != 1:
        known = ", ".join(map(clean, models)) or "none yet"
        raise ValueError(f"--model: is needed where the body names none; the router's models: {known}")
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
    pod, asked = record["pod"], f"{clean(record['kind'])} of {clean(record['model'])}"
    when = f", {max(0.0, now_s - record['time']):,.0f} s ago" if is_sent else ", if it came now"
    yield f"request    {asked}, {count(record['prompt_tokens'])} prompt tokens{when}"
    name = f" ({clean(record['pod_name'])})" if record["pod_name"] else ""
    yield styled(f"pod        {clean(pod)}{name}", BOLD)
    yield f"why        {clean(record['reason'], 500)}"
    for field in ("prefill_pod", "partial", "session_pod"):
        if record[field]:
            yield f"{field:<11}{clean(record[field])}"
    if record["degraded"]:
        yield styled(f"degraded   by load alone: {clean(record['degraded'])}; no cache was looked at", YELLOW)
    predicted, delivered = record["predicted_cached_tokens"], record["delivered_cached_tokens"]
    told = (
        f", delivered {count(delivered)}" if delivered is not None else " (not reported)" if is_sent else ""
    )
    yield f"cached     predicted {count(predicted)}{told}"
    causes = ", ".join(
        f"{count(tokens)} {clean(cause)}" for cause, tokens in record["tokens_by_cause"].items()
    )
    evicted_s = record["evicted_s_ago"]
    yield f"tokens     {causes}{f' ({evicted_s:,.0f} s ago)' if evicted_s is not None else ''}"
    for line in drafters:
        if line.startswith((f"pod={pod}:", f"pod={pod}@")):
            yield f"drafter    {clean(line.partition(': ')[2])}"
    if (broken := record.get("prefix_break")) is not None:
        where = "an unknown message" if broken["message"] is None else f"message {broken['message']}"
        lost = f"{count(broken['lost_tokens'])} tokens lost, {broken['lost_s']:.3f} s"
        yield styled(
            f"broken     {clean(broken['part'])}: {where}, token {count(broken['offset_tokens'])}: {lost}",
            YELLOW,
        )
    for field, what in (("prefill_end", "prefill"), ("end", "end")):
        if record[field]:
            yield f"{what:<11}after {record[field]['after_s']:.3f} s, by {clean(record[field]['source'])}"
    yield ""
    yield from _candidates(record)


def _candidates(record: Mapping[str, Any]) -> Iterator[str]:
    candidates, scored = record["candidates"], any(one["score"] is not None for one in record["candidates"])
    heads = ["pod", "view", *["score"] * scored, "cost s", *_PARTS, "cached", "from host", "in flight"]
    rows = [
        [
            one["pod"],
            one["view"],
            *([f"{one['score']:.3f}" if one["score"] is not None else "-"] * scored),
            f"{one['cost_s']:.4f}",
            *(f"{part(one):.4f}" for part in _PARTS.values()),
            count(one["cached_tokens"]),
            count(one["host_tokens"]),
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
