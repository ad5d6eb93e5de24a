"""Starts the processes of a run on this machine, and stays with them until all have ended.

They find each other as under torchrun. torchrun's own agent does not serve here: after a signal it
loses the exit codes of its children, and it ends a child that is not the first to stop.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flowgrpo_rc.distributed.child import CHANNEL, MESSAGE_BYTES
from flowgrpo_rc.distributed.stopping import EXIT_STOPPED, SIGNALS, StopRequest

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_S = 0.1  # between two looks at the children
NOTICE_S = 30.0  # for the other children to notice that one has failed
ADDRESS = "127.0.0.1"


def launch(command: Sequence[str], num_processes: int, num_threads: int = 1) -> int:
    """Runs a command, which calls `follow_parent` and `say_error`, in processes on this machine.

    The first signal that asks for a stop is passed on to each child once, and they have as long as
    they need. A second SIGTERM or SIGINT ends this process, and when it ends, so do its children.

    Returns:
      0 if all processes are complete, 75 if they have stopped early, otherwise the exit code of the
      first one that failed, which counts as 1 if a signal ended it.
    """
    store = _store()
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(store.port),
        # The store is in this process, and not in that of rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    children: list[_Child] = []
    with StopRequest(None, at_once=True) as stop:
        try:
            # Children inherit the block, so a signal waits until they can receive it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            for rank in range(num_processes):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.append(_Child(command, environment | place, f"{rank} of {num_processes}"))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return _watch(children, stop)
        finally:
            for child in children:
                child.close()


class _Child:
    """A process with a session of its own, so that Ctrl-C reaches its parent alone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self.name = name
        self._channel, theirs = socket.socketpair()
        number = theirs.fileno()
        with theirs:
            self.process = subprocess.Popen(
                command,
                env={**environment, CHANNEL: f"{number}:{os.getpid()}"},
                pass_fds=[number],
                start_new_session=True,
            )

    def last_words(self) -> str:
        """Returns why the child, which has ended, has failed; empty if it said nothing."""
        status = self.process.returncode
        if status < 0:
            return f"error: process {self.name} was ended by {signal.Signals(-status).name}"
        try:
            return self._channel.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT).decode(errors="replace")
        except BlockingIOError:  # a program that the child has started holds the socket, too
            return ""

    def close(self) -> None:
        """Ends the child, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self._channel.close()


def _watch(children: Sequence[_Child], stop: StopRequest) -> int:
    """Waits for the end of all children; returns the exit code of the run."""
    running = list(children)
    failed: list[int] = []
    said = {""}
    signalled = False
    deadline: float | None = None
    while running:
        time.sleep(POLL_S)
        reason = stop.reason()
        if reason is not None and not signalled:
            signalled = True
            for child in running:
                child.process.send_signal(signal.Signals[reason])
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            words = child.last_words()
            if words not in said:
                said.add(words)
                print(words, file=sys.stderr)
            if child.process.returncode not in (0, EXIT_STOPPED):
                failed.append(child.process.returncode)
                deadline = deadline or time.monotonic() + NOTICE_S
        if deadline is not None and time.monotonic() > deadline:
            for child in running:
                child.process.kill()
    if failed:
        return max(1, failed[0])
    return max(child.process.returncode for child in children)


def _store() -> "TCPStore":
    """The store at which the processes meet; only this machine can reach it."""
    from torch.distributed import TCPStore

    listener = socket.create_server((ADDRESS, 0))
    return TCPStore(
        ADDRESS,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
