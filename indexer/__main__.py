"""Entry point of `python -m indexer`, an alias of `kvroute indexer`."""

import sys

from indexer.service.cli import main

sys.exit(main())
