"""Requests go to the pod with their prefix while pods are added, removed and restarted."""

from __future__ import annotations

import time

import pytest

from tests.support.kind.figures import Figures
from tests.support.kind.release import Release, is_ready
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import Conversation, steady_load

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

# A user reads an answer before the next question; the last block's event needs a few milliseconds.
_READS_S = 1.0


def test_a_conversation_stays_at_its_pod_with_predicted_hits(release: Release) -> None:
    """Every turn goes to the same pod, which reports as many cached tokens as the router predicted."""
    conversation = Conversation(release.url, sentences=60)
    answers = []
    for _ in range(4):
        answers.append(conversation.ask())
        time.sleep(_READS_S)
    assert not [answer.error for answer in answers if answer.failed]
    assert len({answer.pod for answer in answers}) == 1
    cached = [answer.cached_tokens for answer in answers[1:]]
    assert min(cached) > 500
    assert cached == [
        release.decision(answer.request_id)["predicted_cached_tokens"] for answer in answers[1:]
    ]


def test_a_scaled_up_replica_is_used_once_it_is_ready(release: Release, figures: Figures) -> None:
    """A new pod gets requests once Ready, and then serves from its own cache."""
    before = set(release.model_servers())
    # Conversations stay at their pods; new ones go to the pod with less load.
    with steady_load(release.url, turns=2) as load:
        release.scale("model-server", 3)

        def newcomer() -> str | None:
            new = {at: pod for at, pod in release.model_servers().items() if at not in before}
            return next((at for at, pod in new.items() if is_ready(pod)), None)

        pod = eventually("a third model server is Ready", newcomer)
        ready_s = time.monotonic()
        mine = eventually("it answers", lambda: [each for each in load.answers if each.pod == pod])
        hit = eventually(
            "it answers from its cache",
            lambda: [each for each in load.answers if each.pod == pod and each.cached_tokens > 100],
        )
    load.assert_none_failed()
    what = "from Ready of a third model server to the first answer from it"
    figures.add("scale_up_to_first_answer_s", max(0.0, mine[0].ended_s - ready_s), what)
    what = "from its Ready to the first answer out of its cache"
    figures.add("scale_up_to_first_hit_s", max(0.0, hit[0].ended_s - ready_s), what)


def test_a_deleted_pod_fails_no_request(release: Release) -> None:
    """A deleted pod completes its requests and gets no new ones from its deletion on."""
    with steady_load(release.url) as load:
        eventually("both model servers answer", lambda: len({each.pod for each in load.answers}) == 2)
        before = release.model_servers()
        address, pod = next(iter(before.items()))
        name = pod["metadata"]["name"]
        release.kubectl("delete", "pod", name, "--wait=false")
        deleted_s = time.monotonic()
        release.await_settled(routers=2, model_servers=2)
        eventually(
            "the deleted pod is gone",
            lambda: name not in release.kubectl("get", "pods", "--output", "name"),
        )
        eventually("its successor answers", lambda: {each.pod for each in load.answers} - before.keys())
    load.assert_none_failed()
    late = [answer for answer in load.since(deleted_s + _READS_S) if answer.pod == address]
    assert late == []


def test_a_restarted_container_does_not_keep_its_old_blocks(release: Release) -> None:
    """A restarted container with the same name and address is known to have an empty cache."""
    conversation = Conversation(release.url, sentences=60)
    first = conversation.ask()
    time.sleep(_READS_S)
    second = conversation.ask()
    assert (second.pod, second.cached_tokens > 500) == (first.pod, True)
    name = release.model_servers()[first.pod]["metadata"]["name"]

    def container() -> dict[str, object]:
        status: dict[str, object] = release.kubectl.get("pod", name)["status"]["containerStatuses"][0]
        return status

    restarts = int(str(container()["restartCount"]))
    release.cluster.kill_container(str(container()["containerID"]))
    eventually("the container was started again", lambda: int(str(container()["restartCount"])) > restarts)
    release.await_settled(routers=2, model_servers=2)
    assert first.pod in release.model_servers()
    third = conversation.ask()
    assert not third.failed, third.error
    decision = release.decision(third.request_id)
    held = {candidate["pod"]: candidate["cached_tokens"] for candidate in decision["candidates"]}
    assert held[first.pod] == 0
    assert decision["predicted_cached_tokens"] == third.cached_tokens < second.cached_tokens


def test_a_crash_fails_only_its_own_requests(release: Release) -> None:
    """While a model server's container is dead, only requests sent to it fail."""
    with steady_load(release.url) as load:
        eventually("both model servers answer", lambda: len({each.pod for each in load.answers}) == 2)
        address, pod = next(iter(release.model_servers().items()))
        release.cluster.kill_container(pod["status"]["containerStatuses"][0]["containerID"])
        killed_s = time.monotonic()
        eventually("the other one answers", lambda: len(load.since(killed_s)) > 20)
        release.await_settled(routers=2, model_servers=2)
    load.assert_none_failed(
        but_on=address, picked=lambda request_id: str(release.decision(request_id)["pod"])
    )
