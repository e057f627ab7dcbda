"""Response headers of the gRPC services."""

from __future__ import annotations

import json

import pytest

from router.doors.ext_proc import ExtProcOptions
from tests.support.router.bench import TINY, Bench, long_text, ready_pod
from tests.support.router.doors import (
    body,
    headers,
    response_headers,
    serving,
    set_headers,
)

pytestmark = pytest.mark.usefixtures("each_transport")

A = ready_pod("10.0.0.1:8000")
BODY = json.dumps({"model": TINY, "prompt": long_text(200)}).encode()


def test_responses_carry_nothing_of_the_decision() -> None:
    """Response headers get only the protocol's marker and nothing about the decision."""
    with serving(Bench().with_pods(A), ExtProcOptions(responses_full=True)) as served:
        *_, answer = served.exchange(
            headers(path="/v1/completions"), body(BODY), response_headers(status="200", end=True)
        )
        assert set_headers(answer) == {"x-went-into-resp-headers": "true"}
