"""The `kvroute top` command: pods and decisions of a router, live on a terminal, else once as plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.flags import CommandParser, add_flags, flag_values
from kvroute.router_pages import RouterPages
from kvroute.terminal import count, screen, table
from router.config.flags import positive_number

_DECISIONS, _DECISIONS_SHOWN = 200, 20
_POD_HEADS = (
    *("pod", "state", "view", "queue s", "in flight", "cached"),
    *("KV used", "tokens/s", "waiting", "held by tier"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command until Ctrl-C; return the exit status."""
    parser = CommandParser(
        "kvroute top",
        "Show a router's pods and latest decisions, again every --interval seconds; where standard output is "
        "no terminal, once as plain lines.",
    )
    parser.add_argument("--interval", type=positive_number, default=1.0, metavar="S", help="(default: 1)")
    add_flags(parser, RouterPages)
    arguments = parser.parse_args(argv)
    pages = RouterPages(**flag_values(RouterPages, arguments))
    if not sys.stdout.isatty():
        print("\n".join(snapshot(pages)))
        return 0
    with screen() as show:
        while True:
            show(snapshot(pages))
            time.sleep(arguments.interval)


def snapshot(pages: RouterPages) -> list[str]:
    """Return the lines of the present state; raises an OSError if the router does not answer."""
    pods = pages.get("/debug/pods")["pods"]
    return list(lines(pods, pages.get(f"/debug/decisions?n={_DECISIONS}")["decisions"], time.time()))


def lines(
    pods: Sequence[Mapping[str, Any]], decisions: Sequence[Mapping[str, Any]], now_s: float
) -> Iterator[str]:
    """Yield the lines that show pods and decisions, as the debug pages have them; `now_s` is Unix time."""
    told = [one for one in decisions if one["delivered_cached_tokens"] is not None and not one["degraded"]]
    predicted = sum(one["predicted_cached_tokens"] for one in told)
    delivered = sum(one["delivered_cached_tokens"] for one in told)
    span_s = max(1.0, now_s - decisions[-1]["time"]) if decisions else 1.0
    yield f"{len(pods)} pods; latest {len(decisions)} decisions: {len(decisions) / span_s:.1f} a second"
    yield f"of {len(told)} reported: {count(predicted)} cached tokens predicted, {count(delivered)} delivered"
    yield ""
    yield from table(_POD_HEADS, [_pod(pod, decisions) for pod in pods], words=(0, 1, 2, 9))
    yield ""
    rows = [
        [
            *(time.strftime("%H:%M:%S", time.localtime(one["time"])), one["pod"]),
            *(count(one[f"{what}_tokens"]) for what in ("prompt", "predicted_cached", "delivered_cached")),
            one["reason"],
        ]
        for one in decisions[:_DECISIONS_SHOWN]
    ]
    yield from table(("time", "pod", "prompt", "predicted", "delivered", "why"), rows, words=(0, 1, 5))


def _pod(pod: Mapping[str, Any], decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    load, work = pod["scraped"] or {}, pod["in_flight"]
    mine = [one for one in decisions if one["pod"] == pod["address"]]
    prompts = sum(one["prompt_tokens"] for one in mine)
    cached = sum(one["predicted_cached_tokens"] for one in mine)
    states = ("asleep" if pod["asleep"] else "", pod["failing"] and "failing", *pod["faults"])
    # Routers of before the dashboard tell neither tiers nor queue.
    tiers, queued_s = pod.get("tokens_by_tier") or {}, pod.get("queued_s")
    return [
        pod["address"],
        pod["why_not"] if not pod["ready"] else ", ".join(filter(None, states)) or "ready",
        pod["view"] or "-",
        "-" if queued_s is None else f"{queued_s:.3f}",
        count(work["awaiting"] + work["decoding"]),
        f"{cached / prompts:.0%}" if prompts else "-",
        "-" if load.get("kv_usage") is None else f"{load['kv_usage']:.0%}",
        count(pod["prefill_tokens_per_s"]),
        count(load.get("waiting")),
        " ".join(f"{tier} {count(tokens)}" for tier, tokens in tiers.items()) or "-",
    ]
