"""``python -m tvmbridge``."""

import sys

from tvmbridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
