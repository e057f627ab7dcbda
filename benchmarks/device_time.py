"""Time that a device computes: by torch's profiler on CUDA; on a CPU the wall time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def wall_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of some work until the device has finished it."""
    _synchronize(device)
    started_s = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - started_s


def busy_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds during which the device computes or copies for some work.

    Gaps in which the device waits for the host are excluded. On a CPU, and on CUDA where the profiler records
    no kernel (stderr says so), they are included.
    """
    if device.type != "cuda":
        return wall_s(work, device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        wall_s(work, device)
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    if not events:
        print("the profiler recorded no kernel: device times include waiting for the host", file=sys.stderr)
        return wall_s(work, device)
    # Streams overlap: count the union of the intervals.
    busy_us, end_us = 0.0, 0.0
    for start_us, stop_us in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy_us += max(0.0, stop_us - max(start_us, end_us))
        end_us = max(end_us, stop_us)
    return busy_us / 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
