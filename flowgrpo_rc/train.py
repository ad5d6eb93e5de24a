"""`python -m flowgrpo_rc.train [overrides]` is `flowgrpo-rc train [overrides]`, for torchrun and
accelerate.
"""

from __future__ import annotations

import sys

from flowgrpo_rc.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
