"""`python -m flowgrpo_rc ...` does what `flowgrpo-rc ...` does."""

from __future__ import annotations

import sys

from flowgrpo_rc.cli import main

if __name__ == "__main__":
    sys.exit(main())
