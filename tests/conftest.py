"""What holds for every test."""

import os

from hypothesis import HealthCheck, settings

from compiled.direct import CHECK_VARIABLE

# Here and in all that tests start: a kernel that is called with other types than before says so.
os.environ[CHECK_VARIABLE] = "1"

# An example's time says more about the machine than about the code; pytest's own limit ends what hangs.
settings.register_profile("kvroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvroute")
