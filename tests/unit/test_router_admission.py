"""Who is shed: priorities, saturation, and the seconds of sessions and adapters."""

from __future__ import annotations

import pytest

from router.errors import SaturatedError
from router.picking.admission import Admission, UtilizationDetector
from router.picking.cost import adapter_delay_s
from router.pods.engine_load import EngineLoad, LoraLoad
from router.pods.load_table import PodBoard
from tests.unit.pricing_support import load

PRIORITIES = {"batch": -1, "chat": 5}
BATCH, CHAT = {"x-llm-d-inference-objective": "batch"}, {"x-llm-d-inference-objective": "chat"}
FULL, HALF = load(waiting=5), load(kv_usage=0.4)


def admitted(headers: dict[str, str], *loads: EngineLoad | None, now_s: float = 0.0) -> int:
    """The priority with which a request passes pods with these loads."""
    board = PodBoard()
    names = [f"a:{place}" for place in range(len(loads))]
    for name, told in zip(names, loads, strict=True):
        if told is not None:
            board.scraped(name, told)
    detector = UtilizationDetector(load_age_max_s=5.0)
    return Admission(PRIORITIES, detector, board).admit(headers, board.rows(names), now_s)


def test_a_sheddable_request_is_refused_while_all_pods_are_saturated() -> None:
    """Below priority 0 a request is answered 429 with the protocol's reason; any other passes."""
    with pytest.raises(SaturatedError) as caught:
        admitted(BATCH, FULL, FULL)
    assert (caught.value.status, caught.value.dropped_reason) == (429, "rejected-saturated")
    assert [admitted(headers, FULL, FULL) for headers in (CHAT, {})] == [5, 0]


def test_one_pod_with_room_lets_a_sheddable_request_pass() -> None:
    """Saturation is the mean over the pods: one half full makes room."""
    assert admitted(BATCH, FULL, HALF) == -1


def test_a_full_kv_cache_saturates_like_a_queue() -> None:
    """Eight tenths of the KV cache, or five in the queue, are full; the greater counts, and the mean."""
    assert admitted(BATCH, load(kv_usage=0.79)) == -1
    with pytest.raises(SaturatedError):
        admitted(BATCH, load(kv_usage=0.8))
    with pytest.raises(SaturatedError):
        admitted(BATCH, load(waiting=10), load())


def test_a_pod_out_of_sight_counts_as_saturated() -> None:
    """A pod that never told its load, or told it long ago, is taken for full."""
    for pods, now_s in (([None], 0.0), ([HALF], 5.5)):
        with pytest.raises(SaturatedError):
            admitted(BATCH, *pods, now_s=now_s)


def test_the_objectives_old_header_name_counts_where_the_new_one_is_missing() -> None:
    """The protocol's former name is read too, and loses to the new one; unknown objectives are priority 0."""
    old = {"x-gateway-inference-objective": "chat"}
    assert admitted(old, HALF) == 5
    assert admitted(old | BATCH, HALF) == -1
    assert admitted({"x-llm-d-inference-objective": "unheard-of"}, FULL) == 0


def lora(running: str = "", waiting: str = "", places: int = 2) -> LoraLoad:
    """Adapters as words."""
    return LoraLoad(frozenset(running.split()), frozenset(waiting.split()), places)


def test_an_adapters_seconds_are_ordered_as_the_reference_scores_them() -> None:
    """Running is free; room costs loading; waiting costs part of a place's wait; no place costs all of it."""
    cases = [lora("sql other"), lora("other"), lora("a b", "sql"), lora("a b")]
    seconds = [adapter_delay_s(case, "sql") for case in cases]
    assert seconds == pytest.approx([0.0, 0.2, 1.2, 2.2])


def test_of_a_pod_that_tells_nothing_of_adapters_nothing_is_charged() -> None:
    """An engine without such a metric is not worse than one that has it."""
    assert adapter_delay_s(None, "sql") == 0.0


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (("sql",), 0.0),
        (("other",), 0.2),
        (("other", "third"), 2.2),
        (("other", "third", "sql"), 1.2),
        (("other", "sql", "third"), 0.0),
    ],
)
def test_adapters_that_were_sent_since_the_scrape_take_places(sent: tuple[str, ...], seconds: float) -> None:
    """Of two places those take one each that were sent first; who comes after them waits for a place."""
    assert adapter_delay_s(lora(), "sql", sent) == pytest.approx(seconds)


def test_a_sent_adapter_that_the_engine_has_seen_counts_once() -> None:
    """What runs or waits there already takes no second place."""
    assert adapter_delay_s(lora("a"), "sql", ("a",)) == pytest.approx(0.2)
    assert adapter_delay_s(lora("", "a"), "sql", ("a",)) == pytest.approx(0.2)
