"""`flowgrpo-rc report`: write the page of a run."""

import argparse
from pathlib import Path

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.report.run import write_report


def main(arguments: argparse.Namespace) -> int:
    """Writes report.html of a run and prints its path."""
    print(write_report(Path(arguments.run_dir)))
    return EXIT_OK
