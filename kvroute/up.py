"""The `kvroute up` command: starts and demonstrates the local stack; keeps logs only after a failure."""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from common.flags import CommandParser, add_flags, flag_values
from kvroute.demo.run import run_demo
from kvroute.doctor.cli import doctor_parser, run_checks
from kvroute.doctor.findings import print_findings
from kvroute.stack import LocalStackError, StackOptions, StackPlan, await_pods, plan_stack
from kvroute.supervisor import Supervisor, check_ports

_WATCH_S = 0.2
_STREAM_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = CommandParser(
        prog="kvroute up",
        description="Start model servers, the router and Envoy on this machine and show the routing; with "
        "--engine or --pods-file, router and Envoy in front of running engines, which are checked.",
    )
    add_flags(parser, StackOptions)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--demo-only", action="store_true", help="end after the demonstration")
    only.add_argument("--no-demo", action="store_true", help="start and stay up without the demonstration")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = StackOptions(**flag_values(StackOptions, arguments))
    return _run(options, demo=not arguments.no_demo, stay=not arguments.demo_only)


def _run(options: StackOptions, *, demo: bool, stay: bool) -> int:
    directory = Path(tempfile.mkdtemp(prefix="kvroute-"))
    supervisor = Supervisor(directory, _progress())
    failed = True
    try:
        _run_in(directory, supervisor, options, demo=demo, stay=stay)
        failed = bool(supervisor.restarted)
    except KeyboardInterrupt:
        failed = False
        raise
    except (ValueError, OSError) as error:
        raise LocalStackError(f"{error}{_logs(directory)}") from error
    finally:
        # A second Ctrl-C must not interrupt the shutdown of children.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        supervisor.stop()
        # Keep the logs of a failure.
        if not (failed and _logs(directory)):
            shutil.rmtree(directory)
    if failed:
        names = ", ".join(dict.fromkeys(supervisor.restarted))
        print(
            f"kvroute up: exit status 1: programs exited and were restarted: {names}{_logs(directory)}",
            file=sys.stderr,
        )
    return int(failed)


def _run_in(
    directory: Path, supervisor: Supervisor, options: StackOptions, *, demo: bool, stay: bool
) -> None:
    plan = plan_stack(options, directory)
    check_ports(plan.ports)
    for file, text in plan.files.items():
        (directory / file).write_text(text, encoding="utf-8")
    supervisor.start(plan.children)
    if options.has_own_engines:
        await_pods(plan, supervisor.check)
        if demo:
            run_demo(plan, supervisor.check, supervisor.say)
    else:
        plan = _check_engines(plan)
    if stay:
        _stay(plan, supervisor, directory)
    supervisor.check()


def _check_engines(plan: StackPlan) -> StackPlan:
    """Print the doctor's findings; return the plan with the engines' model."""
    print("checking engines, router and gateway", flush=True)
    flags = ["--router-url", plan.router_debug_url, "--router-grpc", plan.router_grpc]
    flags += ["--gateway-url", plan.gateway_url, "--stream-s", str(_STREAM_S)]
    findings = run_checks(doctor_parser().parse_args(flags))
    print_findings(findings)
    models = [one.what for one in findings if (one.check, one.status) == ("model", "ok")]
    return replace(plan, model_name=next(iter(models), "MODEL"))


def _logs(directory: Path) -> str:
    """Return the log directory as the end of a message; empty if no program was started."""
    return f"; logs: {directory}" if any(directory.glob("*.log")) else ""


def _stay(plan: StackPlan, supervisor: Supervisor, directory: Path) -> None:
    print(
        f"\nkvroute is up: {plan.gateway_url} (Envoy); pods {', '.join(plan.pod_urls)}\n"
        f"  decisions:        {plan.router_debug_url}/debug/decisions\n"
        f"  metrics:          {plan.router_debug_url}/metrics\n"
        f"  dashboard:        {plan.router_debug_url}/\n"
        f"  round-robin:      {plan.round_robin_url}\n"
        f"  least requests:   {plan.least_requests_url}\n"
        f"  logs:             {directory}\n\n"
        f"  curl -sD- {plan.gateway_url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{plan.model_name}", "max_tokens": 16, '
        f'"messages": [{{"role": "user", "content": "Hello"}}]}}\'\n\n'
        "Ctrl-C ends it.",
        flush=True,
    )
    try:
        while True:
            supervisor.check()
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        print("\nstopping", flush=True)


def _progress() -> Callable[[str], None]:
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {line}", flush=True)

    say("starting the stack")
    return say
