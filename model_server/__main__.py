"""Entry point of ``python -m model_server``; see ``cli``."""

import sys

from model_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
