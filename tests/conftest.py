"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Per-example deadlines measure the machine, not the code; pytest's own limit ends tests that hang.
# Chosen by --hypothesis-profile; properties with a number of their own scale by it: tests/support/depth.py.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
for _name, _examples in (("fast", 10), ("kvroute", 100), ("deep", 1000)):
    settings.register_profile(_name, _ANY, max_examples=_examples)
settings.load_profile("kvroute")
