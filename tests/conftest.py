"""What holds for every test."""

from hypothesis import HealthCheck, settings

# An example's time says more about the machine than about the code; pytest's own limit ends what hangs.
settings.register_profile("kvroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvroute")
