"""`python -m shardweave` is the command `shardweave`."""

from __future__ import annotations

import sys

from shardweave.cli import main

if __name__ == "__main__":
    sys.exit(main())
