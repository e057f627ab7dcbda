"""Load table: sums equal the requests in flight, and rows end with their pods."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from router.pods.load_table import PodLoadTable, PodWork
from tests.support.depth import examples
from tests.support.router.pricing import load

PODS = ("a:0", "a:1", "a:2")


@dataclass
class Flying:
    """Request in flight."""

    pod: str
    tokens: int
    ticket: int
    waits: bool = True


def assert_equal(load_table: PodLoadTable, flying: list[Flying]) -> None:
    """Compare sums, queues and heads with a plain list of the requests in flight."""
    for pod in PODS:
        mine = [request for request in flying if request.pod == pod]
        queued = [request.tokens for request in mine if request.waits]
        held = sum(request.tokens for request in mine)
        assert load_table.work(pod) == PodWork(len(queued), sum(queued), len(mine) - len(queued), held)
        if mine:
            row = load_table.rows([pod])[0]
            assert load_table.pods[row]["head_tokens"] == (queued[0] if queued else 0)


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end_prefill", "end", "declare"]), st.integers(0, 20)),
        max_size=80,
    )
)
def test_the_table_equals_a_recount(steps: list[tuple[str, int]]) -> None:
    """After any history, sums, queues and heads are those of the requests in flight."""
    load_table, flying = PodLoadTable(), list[Flying]()
    for now_s, (action, number) in enumerate(steps):
        pod = PODS[number % 3]
        if action == "begin":
            flying.append(Flying(pod, number, load_table.begin(pod, number, now_s)))
        elif action == "declare":
            load_table.declare(PODS[: number % 4])
        elif flying:
            request = flying[number % len(flying)]
            if action == "end":
                flying.remove(request)
                load_table.end(request.pod, request.ticket, request.tokens, now_s)
            elif request.waits:
                load_table.end_prefill(request.pod, request.ticket, now_s)
                request.waits = False
        assert_equal(load_table, flying)


def test_a_pods_row_ends_with_its_last_request() -> None:
    """A removed pod keeps its sums until its requests end; re-added afterwards, it starts empty."""
    load_table = PodLoadTable()
    load_table.declare(PODS)
    load_table.scraped("a:0", load(waiting=3))
    ticket = load_table.begin("a:0", 10, 0.0)
    load_table.declare(["a:1"])
    assert load_table.work("a:0").awaiting == 1
    load_table.end("a:0", ticket, 10, 1.0)
    load_table.declare(PODS)
    assert load_table.pods[load_table.rows(["a:0"])[0]]["waiting"] == 0.0


def test_rows_are_stable_under_growth() -> None:
    """Each of hundreds of pods has its own row, which stays the same while pods are added."""
    load_table = PodLoadTable()
    names = [f"a:{number}" for number in range(300)]
    load_table.begin("a:0", 7, 0.0)
    rows = load_table.rows(names)
    assert len(set(rows.tolist())) == 300
    assert load_table.rows(names[:1])[0] == rows[0]
    assert load_table.work("a:0").awaiting_tokens == 7


def test_the_prefill_clock_starts_with_the_head_of_the_queue() -> None:
    """A prefill starts when its request is sent to an idle pod, or when the previous prefill ends."""
    load_table = PodLoadTable()
    first, second = load_table.begin("a:0", 10, 1.0), load_table.begin("a:0", 20, 2.0)
    row = load_table.rows(["a:0"])[0]
    assert (load_table.pods[row]["head_tokens"], load_table.pods[row]["head_since_s"]) == (10.0, 1.0)
    load_table.end_prefill("a:0", first, 5.0)
    assert (load_table.pods[row]["head_tokens"], load_table.pods[row]["head_since_s"]) == (20.0, 5.0)
    load_table.end("a:0", second, 20, 6.0)
    assert load_table.pods[row]["head_tokens"] == 0.0
