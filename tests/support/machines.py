"""Two machines in one: namespaces with a network, a name, processes and a /tmp/ray of their own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

_OWN = ("--net", "--mount", "--uts", "--pid")
_START = """mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && hostname $0 && ip link set lo up &&
echo up && exec cat"""
LINK = "eth0"


class Machine(NamedTuple):
    """A machine by its first process, which ends all others when it ends."""

    pid: str
    address: str

    def words(self, *command: str) -> list[str]:
        """Returns the words that run a command there, in `/`."""
        return ["nsenter", f"--target={self.pid}", *_OWN, *command]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Starts two machines that a cable joins, and ends them; skips where that is not allowed."""
    if missing := [name for name in ("ip", "nsenter", "unshare") if not shutil.which(name)]:
        pytest.skip(f"network namespaces need {missing[0]}")
    held = ["unshare", *_OWN, "--fork", "--mount-proc", "--kill-child", "sh", "-c", _START]
    piped = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)  # `cat` ends with us
    parents = [subprocess.Popen([*held, name], text=True, **piped) for name in ("first", "second")]
    try:
        for parent in parents:
            if parent.stdout.readline() != "up\n":
                pytest.skip(f"network namespaces cannot be made here: {parent.stderr.read()}")
        pids = [Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().strip() for p in parents]
        first, second = (Machine(pid, f"10.77.0.{n}") for n, pid in enumerate(pids, start=1))
        ends = [["name", LINK, "netns", machine.pid] for machine in (first, second)]
        link = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
        subprocess.run(link, check=True)
        for machine in (first, second):
            address = f"ip address add {machine.address}/24 dev {LINK} && ip link set {LINK} up"
            subprocess.run(machine.words("sh", "-c", address), check=True)
        yield first, second
    finally:
        for parent in parents:
            parent.kill()
            parent.communicate()
