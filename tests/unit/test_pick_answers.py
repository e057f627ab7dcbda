"""PickEndpoint's hand-written answers: what protobuf reads in them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router._pb import endpoint_picker_pb2 as pb
from router.cost import CREDIT, PRICE
from router.decision import Decision
from router.pick_answers import pick_answer
from router.ranking import Ranking

SECONDS = ("cost_s", "queued_prefill_s", "own_prefill_s", "copy_s", "kv_pressure_s")
numbers = st.floats(allow_nan=False)
tokens = st.integers(0, 2**31)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(
    st.lists(st.tuples(names, tokens, st.tuples(*[numbers] * 5)), min_size=1, max_size=40),
    names,
    tokens,
    st.none() | names,
)
def test_protobuf_reads_what_was_decided(
    pods: list[tuple[str, int, tuple[float, ...]]], request_id: str, prompt_tokens: int, degraded: str | None
) -> None:
    """Every field of every candidate comes out as it went in, in the order of the ranking."""
    prices, credits = np.zeros(len(pods), PRICE), np.zeros(len(pods), CREDIT)
    for place, (_, cached_tokens, seconds) in enumerate(pods):
        credits[place]["cached_tokens"] = cached_tokens
        for name, value in zip(SECONDS, seconds, strict=True):
            prices[place][name] = value
    order = np.arange(len(pods))[::-1].copy()
    addresses = [f"{name}:{place}" for place, (name, _, _) in enumerate(pods)]
    ranked = Ranking(
        addresses, prices, credits, order, prompt_tokens, 16, [], int(credits["cached_tokens"].max())
    )
    decision = Decision(request_id, "chat", "m", ranked, {}, prompt_tokens, degraded, 0.0)
    answer = pb.PickEndpointResponse.FromString(pick_answer(decision, lambda address: f"pod {address}"))
    assert [endpoint.address for endpoint in answer.endpoints] == addresses[::-1]
    for endpoint, candidate in zip(answer.endpoints, ranked, strict=True):
        assert endpoint.pod_name == f"pod {endpoint.address}"
        assert [getattr(endpoint, name) for name in SECONDS] == [getattr(candidate, name) for name in SECONDS]
        assert (endpoint.cached_tokens, endpoint.view) == (candidate.cached_tokens, candidate.view)
    assert (answer.request_id, answer.reason) == (request_id, decision.reason)
    assert (answer.prompt_tokens, answer.degraded) == (prompt_tokens, degraded or "")
