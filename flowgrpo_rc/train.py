"""`python -m flowgrpo_rc.train ...` does what `flowgrpo-rc train ...` does, for torchrun and
accelerate, which start modules.
"""

import sys

from flowgrpo_rc.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
