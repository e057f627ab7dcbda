"""Findings of the doctor: the table of cases and the output."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import yaml

from kvroute.cli import main
from kvroute.doctor import findings
from kvroute.doctor.findings import Report, exit_status, print_findings
from kvroute.engines import declared_engine, engine_argument

FOLDER = Path(findings.__file__).parent
CASES = yaml.safe_load((FOLDER / "findings.yaml").read_text())


@pytest.mark.parametrize("check", CASES)
def test_every_fault_has_a_remedy_and_is_reported_somewhere(check: str) -> None:
    """A case has one status; warnings and failures name a remedy; the code names every case."""
    code = "".join(file.read_text() for file in FOLDER.glob("*.py"))
    for case, texts in CASES[check].items():
        (status,) = texts.keys() - {"remedy"}
        assert status in ("ok", "warn", "fail", "skipped")
        assert texts.get("remedy") or status in ("ok", "skipped")
        assert re.search(rf'"{case}"', code), f"{check}.{case} is never reported"


def test_findings_are_lines_with_the_remedy_behind_an_arrow(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal a finding is one line, its remedy the next one, and the last line counts."""
    report = Report("127.0.0.1:8000")
    report.add("engine", "answers")
    report.add("block_size", "no_multiple", size=24, router=16)
    print_findings(report.findings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok      engine      127.0.0.1:8000: answers"
    assert lines[1].startswith("fail    block_size  127.0.0.1:8000: blocks of 24 tokens")
    assert lines[2].strip().startswith("-> start the router with --block-tokens 24")
    assert lines[3] == "1 ok, 0 warn, 1 fail, 0 skipped"
    assert exit_status(report.findings) == 1


def test_texts_of_servers_do_not_control_the_terminal() -> None:
    """Escape sequences and line feeds in a server's answer are question marks in a finding."""
    report = Report("127.0.0.1:8000")
    report.add("engine", "unhealthy", why="500: \x1b[2Jgone\n")
    assert report.findings[0].what == "/health answered 500: ?[2Jgone?"


def test_an_engine_is_an_address_and_its_ports() -> None:
    """The value of --engine names a server with or without http://, and its ports of events and replays."""
    engine = declared_engine(engine_argument("http://localhost:8000,events=6000,replay=6001"))
    assert engine.address == "127.0.0.1:8000"
    assert engine.stream is not None
    assert engine.stream.events_endpoint == "tcp://127.0.0.1:6000"
    assert engine.stream.replay_endpoint == "tcp://127.0.0.1:6001"
    plain = declared_engine(engine_argument("127.0.0.1:8000")).stream
    assert plain is not None
    assert (plain.events_endpoint, plain.replay_endpoint) == ("tcp://127.0.0.1:5557", None)


@pytest.mark.parametrize(
    "text",
    ["", "8000", "host", "https://a:1", "127.0.0.1:99999", "127.0.0.1:1,events=x", "127.0.0.1:1,port=2"],
)
def test_an_invalid_engine_is_rejected(text: str) -> None:
    """Another form of --engine is rejected with the right one."""
    with pytest.raises(ArgumentTypeError):
        engine_argument(text)


@pytest.mark.parametrize(
    "flags", [[], ["--router-url", "localhost"], ["--gateway-url", "http://a", "--stream-s", "0"]]
)
def test_wrong_flags_end_with_status_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that name nothing to check, or no URL, end with status 2 and one line."""
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *flags])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_cannot_be_reached_is_a_failure_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Addresses without a server give findings and status 1, not a traceback."""
    nothing = "http://127.0.0.1:9"
    flags = [
        "--router-url",
        nothing,
        "--engine",
        "127.0.0.1:9",
        "--gateway-url",
        nothing,
        "--envoy-admin",
        nothing,
    ]
    assert main(["doctor", *flags]) == 1
    out = capsys.readouterr().out
    assert "start the router, or correct --router-url" in out
    assert "start the engine, or correct its address" in out
    assert "correct --envoy-admin" in out
