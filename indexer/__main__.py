"""`python -m indexer`: the same as `kvroute indexer`."""

import sys

from indexer.service.cli import main

sys.exit(main())
