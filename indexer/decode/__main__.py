"""`python -m indexer.decode`: what an engine published, in hex, as JSON."""

import sys

from indexer.decode.cli import main

sys.exit(main())
