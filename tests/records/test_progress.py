"""The progress bar of a run that Python has started, on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

from flowgrpo_rc.records.progress import is_seen

# Tests run without bars, and a bar that is off draws nothing: this program runs by itself.
PROGRAM = """
import logging, os, signal, sys
from pathlib import Path
from flowgrpo_rc.distributed.stopping import StopRequest
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.progress import ProgressBar, is_seen

print("seen:", is_seen())
os.environ["RANK"] = "1"
print("seen of another process:", is_seen())
del os.environ["RANK"]
warnings = MetricsFile(Path(sys.argv[1]))
warnings.append(1, {"message": "an old one"})
with StopRequest(None) as stop, ProgressBar(warnings, 3) as bar:
    bar.step(1, {"reward/mean": 0.5, "actor/pg_loss": -0.25})
    warnings.append(2, {"message": "much is rejected"})
    bar.step(2, {"reward/mean": 0.75, "val/reward": 0.625})
    os.kill(os.getpid(), signal.SIGINT)
    logging.getLogger("flowgrpo_rc").warning("a prompt is cut")
    bar.step(3, {})
"""


def on_a_terminal(*command: str) -> str:
    """Returns what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    environment = {name: os.environ[name] for name in os.environ if name != "TQDM_DISABLE"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        try:
            while block := os.read(ours, 4096):
                output += block
        except OSError:  # what Linux answers when the other end is closed
            os.close(ours)
    assert process.returncode == 0, output
    return output.decode()


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    output = on_a_terminal(sys.executable, "-c", PROGRAM, str(tmp_path / "health.jsonl"))
    assert "seen: True" in output
    assert "seen of another process: False" in output
    first, *_, last = re.findall(r"(?:loading|training): +\d+%[^\r\n]*", output)
    assert re.search(r"loading: +0%.* 0/3 ", first)
    assert re.search(r" 2/3 \[\d\d:\d\d<\d\d:\d\d,.*reward=0\.75, loss=-0\.25, held-out", output)
    assert re.search(r"training: 100%.* 3/3 .*held-out reward=0\.625", last)
    lines = re.split(r"[\r\n]+", output)
    assert "an old one" not in output
    stopping = "stopping after this step; again to end now"
    for told in ("warning: much is rejected", "a prompt is cut", stopping):
        assert lines.count(told) == 1


def test_nothing_is_seen_where_there_is_no_terminal() -> None:
    assert not is_seen()


def test_a_command_on_a_terminal_says_at_once_that_it_has_begun() -> None:
    output = on_a_terminal(sys.executable, "-m", "flowgrpo_rc", "train", "--cfg", "job")
    assert output.startswith("train: loads libraries and checks")
