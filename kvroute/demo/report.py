"""Report of the demonstration: a table of all requests, a bar chart and five lines."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvroute import terminal

KVROUTE, ROUND_ROBIN, LEAST_REQUESTS = "kvroute", "round-robin", "least requests"

_BAR = 40  # characters of the longest bar
_REQUESTS_PER_LINE = 4
# A mean time to first token that is less than a tenth shorter is no gain: runs differ as much.
_GAIN = 0.9


@dataclass(slots=True)
class Answer:
    """Result of one request."""

    request_id: str  # from Envoy
    pod: str  # "ip:port"
    text: str
    prompt_tokens: int
    cached_tokens: int  # reported by the engine in `usage.prompt_tokens_details`
    ttft_s: float  # seconds from the request to the first token
    part: str = ""
    session: str = ""
    predicted_tokens: int | None = None  # cached tokens predicted by the router; None: not routed by it


# Answers by policy, in the same order of requests.
Results = Mapping[str, Sequence[Answer]]


def table(results: Results) -> str:
    """Return a table of a round: cached tokens of each request, and in parentheses wrong predictions."""
    sessions = dict.fromkeys(answer.session for answer in results[KVROUTE])
    rows = []
    for session in sorted(sessions, key=lambda name: (name.split()[0], int(name.split()[1]))):
        mine = [[answer for answer in answers if answer.session == session] for answers in results.values()]
        for at in range(0, len(mine[0]), _REQUESTS_PER_LINE):
            cells = [answers[at : at + _REQUESTS_PER_LINE] for answers in mine]
            prompts = " ".join(f"{answer.prompt_tokens:>4}" for answer in cells[0])
            rows.append([session, prompts, *(" ".join(map(_cached, answers)) for answers in cells)])
    heads = ["cached tokens", "of prompts", *results]
    return "\n".join(terminal.table(heads, rows, words=range(len(heads))))


def report(results: Results) -> str:
    """Return the bar charts and the lines of all rounds."""
    parts = _parts(results)
    charts = [_chart("mean time to first token in ms, shorter is better", results, _ttft_ms, parts)]
    charts.append(
        _chart("prompt tokens from the cache in %", results, lambda all_: 100 * _cached_share(all_))
    )
    charts.append(_chart("prompt tokens computed, fewer is better", results, _computed_tokens))
    return "\n\n".join([*charts, _lines(results)])


def _cached(answer: Answer) -> str:
    if answer.predicted_tokens is None or answer.predicted_tokens == answer.cached_tokens:
        return f"{answer.cached_tokens:>4}"
    return f"{answer.cached_tokens:>4} ({answer.predicted_tokens})"


def _chart(
    title: str, results: Results, figure: Callable[[Sequence[Answer]], float], parts: Sequence[str] = ("",)
) -> str:
    """Return bars of a figure by policy, for each part or, without parts, for all requests."""
    figures = [
        (part if policy == KVROUTE else "", policy, figure(_of(part, answers)))
        for part in parts
        for policy, answers in results.items()
    ]
    longest = max(value for *_, value in figures) or 1.0
    mark = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    lines = [title]
    for part, policy, value in figures:
        bar = mark * max(1, round(_BAR * value / longest))
        bar = terminal.styled(bar, terminal.GREEN if policy == KVROUTE else "")
        lines.append(f"  {part:<14}{policy:<15}{bar} {value:,.0f}")
    return "\n".join(lines)


def _lines(results: Results) -> str:
    ours = results[KVROUTE]
    others = {policy: answers for policy, answers in results.items() if policy != KVROUTE}
    computed_tokens = _computed_tokens(ours)
    exact = sum(answer.predicted_tokens == answer.cached_tokens for answer in ours)
    without = [
        f"{part} ({_ttft_ms(mine):.0f} ms against {best:.0f})"
        for part in _parts(results)
        if _ttft_ms(mine := _of(part, ours))
        > _GAIN * (best := min(_ttft_ms(_of(part, all_)) for all_ in others.values()))
    ]
    return "\n".join(
        [
            f"first token:  {_ttft_ms(ours):.0f} ms in the mean; "
            + "; ".join(f"{policy} {_ttft_ms(all_):.0f} ms" for policy, all_ in others.items()),
            f"from cache:   {_cached_share(ours):.0%} of {sum(each.prompt_tokens for each in ours):,} prompt "
            f"tokens; " + "; ".join(f"{policy} {_cached_share(all_):.0%}" for policy, all_ in others.items()),
            f"computed:     {computed_tokens:,} prompt tokens; "
            + "; ".join(
                f"{policy} {_computed_tokens(all_):,}, {_computed_tokens(all_) / computed_tokens:.1f} times "
                "as many"
                for policy, all_ in others.items()
            ),
            f"prediction:   cached tokens predicted = delivered in {exact} of {len(ours)} requests",
            f"no gain:      {'; '.join(without) or 'in no part'}",
        ]
    )


def _parts(results: Results) -> list[str]:
    return list(dict.fromkeys(answer.part for answer in results[KVROUTE]))


def _of(part: str, answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if part in ("", answer.part)]


def _ttft_ms(answers: Sequence[Answer]) -> float:
    return 1000 * fmean(answer.ttft_s for answer in answers)


def _cached_share(answers: Sequence[Answer]) -> float:
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


def _computed_tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
