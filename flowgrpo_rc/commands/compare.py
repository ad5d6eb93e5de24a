"""`flowgrpo-rc compare`: write one page about several runs."""

import argparse
from pathlib import Path

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.report.compare import write_comparison


def main(arguments: argparse.Namespace) -> int:
    """Writes a page about two to four runs and prints its path."""
    folders = [Path(folder) for folder in arguments.run_dir]
    print(write_comparison(folders, Path(arguments.out)))
    return EXIT_OK
