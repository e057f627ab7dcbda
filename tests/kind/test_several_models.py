"""Several models in one release: the router picks by the model in a request's body."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.kind.release import Release, base_values
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import Conversation

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

_SECOND = "second"
# A user reads an answer before the next question; the last block's event needs a few milliseconds.
_READS_S = 1.0


@pytest.fixture
def two_models(release: Release) -> Iterator[Release]:
    """Add a set of one model server under another name."""
    base = base_values(release.kubectl.namespace)
    more = {_SECOND: {"model": {"name": _SECOND}, "replicas": 1}}
    try:
        release.install({**base, "moreModelServers": more})
        release.await_settled(routers=2, model_servers=3)
        selector = "app.kubernetes.io/component=router"
        # Routers of before answer until they are gone, and take their decisions with them.
        eventually("two routers", lambda: len(release.kubectl.items("pods", "--selector", selector)) == 2)
        yield release
    finally:
        release.install(base)


def test_requests_go_to_pods_of_their_model(two_models: Release) -> None:
    """Conversations stay at one pod of their model, with hits as predicted; an unknown model gets 404."""
    sets = {
        address: pod["metadata"]["labels"]["kvroute.dev/model-servers"]
        for address, pod in two_models.model_servers().items()
    }
    assert sorted(sets.values()) == ["main", "main", _SECOND]
    for model, expected in (("kvroute-tiny", "main"), (_SECOND, _SECOND)):
        conversation, answers = Conversation(two_models.url, model=model), []
        for _ in range(3):
            answers.append(conversation.ask())
            time.sleep(_READS_S)
        assert not [answer.error for answer in answers if answer.failed]
        assert [sets[answer.pod] for answer in answers] == [expected] * 3
        assert len({answer.pod for answer in answers}) == 1
        cached = [answer.cached_tokens for answer in answers[1:]]
        decisions = [two_models.decision(answer.request_id) for answer in answers[1:]]
        assert min(cached) > 500
        assert cached == [decision["predicted_cached_tokens"] for decision in decisions]
    assert Conversation(two_models.url, model="third").ask().status == 404
