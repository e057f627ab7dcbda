"""Following a hybrid engine over real sockets: its cache groups limit the match."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from indexer import StreamState
from tests.support.indexer.engine_publisher import EnginePublisher, removed, stored
from tests.support.indexer.subscriber import OTHER, POD, TOKENS, Watched, block, stream

FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer."""
    running = Watched(replay_attempts=2)
    yield running
    running.indexer.close()


def hybrid_run() -> list[dict[str, object]]:
    """Return one request's blocks as in vLLM: the window's last two, then all of full attention."""
    return [stored([4, 5], TOKENS[:20], **WINDOW), stored([1, 2, 3, 4, 5], TOKENS[:20], **FULL)]


def test_a_window_cuts_the_answer(watched: Watched) -> None:
    """Blocks outside of the sliding window are no hit; other pods are not affected."""
    with EnginePublisher() as hybrid, EnginePublisher() as plain:
        watched.follow(stream(hybrid), stream(plain, OTHER))
        hybrid.publish(*hybrid_run())
        plain.publish(*(block(number) for number in range(1, 6)))
        watched.settled(5)
        watched.settled(5, pod=OTHER)
        assert watched.indexer.match(watched.keys[:5], [POD], prompt_tokens=20)[POD].cached_blocks == 0
        hybrid.publish({**removed([5]), "group_idx": 0})
        watched.settled(0)
        assert watched.match(OTHER).cached_blocks == 5


def test_a_new_process_drops_the_groups(watched: Watched) -> None:
    """An engine that restarts without windows is matched without their rule."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(*hybrid_run())
        watched.settled(5)
        watched.follow()
        watched.settled(0, StreamState.STALE)
        assert watched.indexer.stats().blocks == 0
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(*(block(number) for number in range(1, 5)))
        watched.settled(4)


def test_a_group_whose_rule_is_not_known_makes_the_view_stale(watched: Watched) -> None:
    """A view with a group of unknown kind is STALE, because its match may be too long."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(*hybrid_run())
        watched.settled(5)
        engine.publish(stored([4], TOKENS[:16], group_idx=2, kv_cache_spec_kind="unknown"))
        watched.settled(5, StreamState.STALE)
