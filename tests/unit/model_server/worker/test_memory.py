"""Size of the KV pool: what is left of the memory, in whole blocks, and clear errors where nothing is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.errors import ConfigError
from model_server.worker import memory
from model_server.worker.memory import free_host_bytes, pool_blocks

SIZES = st.integers(1, 1 << 40)


@given(SIZES, SIZES, SIZES)
def test_blocks_take_what_is_left(usable: int, taken: int, block: int) -> None:
    """As many blocks as fit are used, and not one is an error."""
    if usable - taken < block:
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            pool_blocks(usable_bytes=usable, taken_bytes=taken, block_bytes=block)
        return
    blocks = pool_blocks(usable_bytes=usable, taken_bytes=taken, block_bytes=block)
    assert taken + blocks * block <= usable < taken + (blocks + 1) * block


def test_a_control_group_limits_the_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, the limit of its control group counts, not the machine's memory."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    free = free_host_bytes()
    assert free > 1 << 20
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, want in (("max", free), ("5000", 4000), ("500", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_host_bytes() == pytest.approx(want, rel=0.2)


def test_a_share_of_the_free_memory_makes_the_pool() -> None:
    """On a CPU, twice the share gives about twice the blocks, and the longest request follows."""
    engines = [build_engine(EngineConfig(gpu_memory_utilization=share)) for share in (0.001, 0.002)]
    first, second = (engine.stats().total_blocks for engine in engines)
    assert 1.5 < second / first < 3.0
    for engine in engines:
        engine.close()


def test_defaults_follow_the_device() -> None:
    """A GPU's larger batches and its share of memory are defaults, which flags override."""
    cpu, cuda = EngineConfig(), EngineConfig(device="cuda:1")
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.gpu_blocks) == (64, 2048, 1024)
    assert (cuda.max_num_seqs, cuda.max_num_batched_tokens, cuda.gpu_blocks) == (256, 8192, None)
    assert (cpu.gpu_memory_utilization, cuda.gpu_memory_utilization) == (None, 0.9)
    given_blocks = EngineConfig(device="cuda", gpu_blocks=7, max_num_seqs=3)
    assert (given_blocks.gpu_blocks, given_blocks.max_num_seqs) == (7, 3)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.1, float("nan")])
def test_shares_out_of_range_are_rejected(share: float) -> None:
    """A share must be above 0 and at most 1."""
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_a_pool_that_does_not_fit_is_a_clear_error() -> None:
    """The error of a pool that is too large names its blocks."""
    with pytest.raises(ConfigError, match=r"cannot allocate 10{15} blocks"):
        build_engine(EngineConfig(gpu_blocks=10**15))


def test_sleep_tells_what_it_gives_back(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the bytes of the pool, and that the weights stay."""
    engine = build_engine(EngineConfig(gpu_blocks=64))
    size = 64 * engine.stats().block_bytes
    with caplog.at_level("INFO"):
        assert engine.sleep()
    assert f"asleep: {size / 1e6:,.2f} MB given back; the weights stay" in caplog.text
    assert engine.wake_up()
    assert engine.stats().total_blocks == 64
    engine.close()
