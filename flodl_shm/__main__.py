"""`python -m flodl_shm COMMAND`: the same as `flodl-shm COMMAND`."""

from __future__ import annotations

import sys

from flodl_shm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
