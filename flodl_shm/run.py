"""`python -m flodl_shm.run [OPTIONS] [SCRIPT] [ARGS...]`: the same as `flodl-shm run`."""

from __future__ import annotations

import sys

from flodl_shm.cli.main import main_run

if __name__ == "__main__":
    sys.exit(main_run())
