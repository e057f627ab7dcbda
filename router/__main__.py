"""`python -m router`: the same as `kvroute router`."""

import sys

from router.app.server import main

sys.exit(main())
