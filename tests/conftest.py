"""Settings of all tests."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Without a GPU, kernels in Triton run in its interpreter. It must be chosen before anything imports Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Per-example deadlines measure the machine, not the code; pytest's own limit ends tests that hang.
# Chosen by --hypothesis-profile; properties with a number of their own scale by it: tests/support/depth.py.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
for _name, _examples in (("fast", 10), ("kvroute", 100), ("deep", 1000)):
    settings.register_profile(_name, _ANY, max_examples=_examples)
settings.load_profile("kvroute")
