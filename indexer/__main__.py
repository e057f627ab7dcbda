"""`python -m indexer`: the same as `kvroute indexer`."""

import sys

from indexer.cli import main

sys.exit(main())
