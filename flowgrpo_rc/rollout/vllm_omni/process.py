"""The engine's process as the trainer sees it: start, ask, and notice when it crashes or hangs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from flowgrpo_rc.libraries import allocator_for_vllm
from flowgrpo_rc.rollout.devices import visible_device
from flowgrpo_rc.rollout.engine import EngineError, EngineLost
from flowgrpo_rc.rollout.vllm_omni.channel import Message, receive, send

# Variables that the engine must not see: those by which torchrun, accelerate, MPI and Slurm tell a
# trainer about its process group, and secrets that no engine needs.
LAUNCHER = re.compile(
    r"(RANK|WORLD_SIZE|NODE_RANK)$"
    r"|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|TORCH_NCCL|ACCELERATE|FSDP|OMPI|PMI|PMIX|SLURM|WANDB)_"
)
LOG_LINES = 30  # of the log, in a message
POLL_S = 1.0  # between two looks whether the child is alive
CLOSE_S = 20.0  # for an orderly end


def child_environment(
    parent: Mapping[str, str], device: torch.device, tensor_parallel_size: int
) -> dict[str, str]:
    """Returns the engine's environment: without the launcher's variables, with its GPUs."""
    environment = {"VLLM_LOGGING_LEVEL": "WARNING"} | {
        name: value for name, value in parent.items() if not LAUNCHER.match(name)
    }
    environment |= allocator_for_vllm(parent)
    if device.type == "cpu":
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment, "VLLM_TARGET_DEVICE": "cpu"}
    if tensor_parallel_size == 1:
        environment["CUDA_VISIBLE_DEVICES"] = visible_device(device)
    return environment


class EngineProcess:
    """A child process, joined to the trainer by a pair of sockets; it ends when its socket closes.

    It has a session of its own, so Ctrl-C reaches the trainer alone. After a failure, `log` is the
    file with its output.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
    ) -> None:
        """Starts `command` with its socket's number appended; silence for `timeout_s` is fatal."""
        self._timeout_s = timeout_s
        self.log: Path | None = None
        # Without a name it is gone with the processes, however they end.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        ours, theirs = socket.socketpair()
        # A child may stop in the middle of a message, where polling does not help. The options take
        # a C timeval: seconds and microseconds.
        limit = struct.pack("ll", int(timeout_s) + 1, 0)
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, limit)
        with theirs:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def ask(
        self,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[Message]:
        """Sends a request and yields its replies, the last of which is `done`, or EngineError."""
        try:
            send(self._connection, kind, fields, tensors or {})
        except OSError as error:
            self.fail(f"did not take the request {kind!r} ({error})", EngineLost)
        while True:
            reply = self._receive(kind, timeout_s or self._timeout_s)
            if reply.kind == "error":
                self.fail(f"failed in {kind!r}: {reply.fields['error']}")
            yield reply
            if reply.kind == "done":
                return

    def close(self) -> None:
        """Ends the child and waits for it; by force if it takes too long."""
        if self._child.poll() is None:
            try:
                send(self._connection, "close", {}, {})
                self._child.wait(CLOSE_S)
            except (OSError, subprocess.TimeoutExpired):
                self._kill()
        self._connection.close()
        self._output.close()

    def fail(self, what: str, kind: type[EngineError] = EngineError) -> NoReturn:
        """Ends the child and raises an error with what it did and the end of its log."""
        how = _ending(self._kill())
        handle, name = tempfile.mkstemp(prefix="flowgrpo_rc_vllm_omni_", suffix=".log")
        self._output.seek(0)
        with os.fdopen(handle, "wb") as log:
            shutil.copyfileobj(self._output, log)
        self.log = Path(name)
        lines = self.log.read_text(errors="replace").splitlines()
        tail = "\n".join(lines[-LOG_LINES:]) or "(empty)"
        self.close()
        raise kind(
            f"the vLLM-Omni engine (process {self.pid}) {what}; {how}. The end of its log, "
            f"{self.log}:\n{tail}"
        )

    def _receive(self, kind: str, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        while not self._connection.poll(POLL_S):
            if self._child.poll() is not None and not self._connection.poll():
                self.fail(f"ended while it worked on {kind!r}", EngineLost)
            if time.monotonic() > deadline:
                what = f"has not answered {kind!r} for {timeout_s:g} s, the limit of timeout_s"
                self.fail(what, EngineLost)
        try:
            return receive(self._connection)
        except (EOFError, OSError):
            self.fail(f"broke off while it worked on {kind!r}", EngineLost)

    def _kill(self) -> int | None:
        """Ends the child and all that it started; returns its exit status if it had one before."""
        try:
            status = self._child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(self.pid, signal.SIGKILL)  # with all that it started
        except ProcessLookupError:
            return status
        self._child.wait()
        return status


def _ending(status: int | None) -> str:
    if status is None:
        return "it was killed"
    if status < 0:
        return f"signal {signal.Signals(-status).name} ended it"
    return f"its exit status is {status}"
