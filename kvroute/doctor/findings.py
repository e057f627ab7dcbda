"""Findings of the doctor, declared in findings.yaml, and their output."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from kvroute.terminal import GREEN, RED, YELLOW, clean, styled

Status = Literal["ok", "warn", "fail", "skipped"]
_STYLES: dict[Status, str] = {"ok": GREEN, "warn": YELLOW, "fail": RED, "skipped": ""}
_CLOCK_SKEW_MAX_S, _TEXT_CHARS_MAX = 2.0, 2000
_TABLE = Path(__file__).with_name("findings.yaml")


class Finding(msgspec.Struct, frozen=True):
    """Result of one check."""

    check: str
    subject: str  # an address, URL or namespace
    status: Status
    what: str  # what was found
    remedy: str = ""  # the flag, field or command that mends it; empty if there is nothing to mend


@cache
def _cases() -> dict[str, dict[str, dict[Any, str]]]:
    cases: dict[str, dict[str, dict[Any, str]]] = yaml.safe_load(_TABLE.read_text("utf-8"))
    return cases


@dataclass(frozen=True, slots=True)
class Report:
    """Collector of the findings about one subject."""

    subject: str
    findings: list[Finding] = field(default_factory=list)

    def add(self, check: str, case: str, **values: object) -> None:
        """Add a finding of findings.yaml, whose fields are `values`."""
        # Other servers' texts must not control the terminal.
        cases = _cases()[check][case].items()
        texts = {name: clean(text.format(**values), _TEXT_CHARS_MAX) for name, text in cases}
        remedy = texts.pop("remedy", "")
        ((status, what),) = texts.items()
        self.findings.append(Finding(check, self.subject, status, what, remedy))

    def judge_clock(self, date: str | None) -> None:
        """Report how far the clock behind a Date header is from this machine's; call it at once."""
        try:
            # The header has whole seconds, rounded down.
            ahead_s = parsedate_to_datetime(date or "").timestamp() + 0.5 - time.time()
        except (ValueError, TypeError):
            return
        case = "agrees" if abs(ahead_s) <= _CLOCK_SKEW_MAX_S else "skewed"
        self.add("clock", case, most_s=_CLOCK_SKEW_MAX_S, ahead_s=ahead_s)


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.status == "fail" for finding in findings))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding with its remedy, then the number of each status."""
    for one in findings:
        status = styled(f"{one.status:<8}", _STYLES[one.status])
        print(f"{status}{one.check:<11} {one.subject}: {one.what}")
        if one.remedy:
            print(f"{'':<20}-> {one.remedy}")
    counts = Counter(one.status for one in findings)
    print(", ".join(f"{counts[status]} {status}" for status in _STYLES), flush=True)
