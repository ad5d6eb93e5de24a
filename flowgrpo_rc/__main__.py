"""`python -m flowgrpo_rc ...` does what `flowgrpo-rc ...` does."""

import sys

from flowgrpo_rc.cli import main

if __name__ == "__main__":
    sys.exit(main())
