"""The command line parses before it imports anything heavy."""

from __future__ import annotations

import os
import sys

import pytest
from support.launching import ran

HEAVY = ("torch", "diffusers", "transformers", "hydra", "omegaconf", "numpy", "accelerate", "rich")
HEAVY += ("mkdocs", "latex2mathml")  # of the documentation alone
PROGRAM = f"""
import sys
from flowgrpo_rc.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stopped:
    print(stopped.code, [name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["serve-reward", "--help"], 0),
        ([], 2),
        (["trian"], 2),
        (["plan", "--processes", "many"], 2),
        (["export", "folder"], 2),
    ],
    ids=["help", "train", "serve-reward", "nothing", "typo", "no_number", "no_folder"],
)
def test_help_and_usage_errors_import_nothing_heavy(words: list[str], code: int) -> None:
    done = ran(sys.executable, "-W", "error", "-c", PROGRAM, *words)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{code} []")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flowgrpo-rc tra", "train "),
        ("flowgrpo-rc plan --config-name token", "token_grpo "),
        ("flowgrpo-rc train rollout.qu", "rollout.quantization="),
        ("flowgrpo-rc train rollout.n=2 +experiment=sana", "+experiment=sana_600m_ocr_1xh100 "),
        ("flowgrpo-rc train --dry", "--dry-run "),
    ],
)
def test_a_shell_completes_the_word_at_the_cursor(line: str, found: str) -> None:
    """argcomplete's protocol: the line in variables, the words on file descriptor 8."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    script = 'exec "$0" -c "$1" 8>&1 9>&2'
    environment = os.environ | asked | {"COMP_TYPE": "9"}
    done = ran("bash", "-c", script, sys.executable, PROGRAM, env=environment)
    assert (done.returncode, done.stdout) == (0, found)
