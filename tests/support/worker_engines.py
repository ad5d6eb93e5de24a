"""Engines that harm the worker that they are in, once, or wait for the training."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.launching import wait_for

from flowgrpo_rc.cli import main
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutChunk
from flowgrpo_rc.training.update import PolicyUpdate


class Harmful(DiffusersEngine):
    """Harms its worker in each way that a file in a folder names, and takes the file away.

    Args:
      folder: holds files such as `harm_2_kill`: of the step, and `kill`, `hang`, `raise`,
        `settings` or `weights`.
    """

    def __init__(self, *given: Any, folder: str, **options: Any) -> None:
        super().__init__(*given, **options)
        self._folder = Path(folder)

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        for chunk in super().generate(request):
            for path in sorted(self._folder.glob(f"harm_{request.prompts.step}_*"))[:1]:
                path.unlink()
                chunk = self._harmed(chunk, path.name.rpartition("_")[2])
            yield chunk

    def _harmed(self, chunk: RolloutChunk, harm: str) -> RolloutChunk:
        match harm:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "settings":
                spec = replace(chunk.batch.spec, guidance_scale=7.0)
                return replace(chunk, batch=replace(chunk.batch, spec=spec))
            case "weights":
                next(iter(self._replica.lora.values())).data.add_(1)
                return chunk
        raise ArithmeticError("a worker's engine has failed")


class OtherPackages(DiffusersEngine):
    """Is in a process that has another torch."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.1" if name == "torch" else version(name)


def meet(folder: Path, mine: str, other: str) -> None:
    """Waits until two processes are here at the same time."""
    (folder / f"met_{mine}").touch()
    wait_for((folder / f"met_{other}").exists, timeout_s=60)


class Meeting(DiffusersEngine):
    """Samples step 3 only while a step is trained, which a file in `folder` tells."""

    def __init__(self, *given: Any, folder: str, **options: Any) -> None:
        super().__init__(*given, **options)
        self._folder = Path(folder)

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        if request.prompts.step == 3:
            meet(self._folder, "sampling", "training")
        yield from super().generate(request)


def train_and_meet(words: list[str]) -> None:
    """Trains, and begins the second update only while a step is sampled."""
    folder = Path(words[0])
    run = PolicyUpdate.run
    updates = 0

    def meeting(self: PolicyUpdate, *given: Any, **options: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == 2:
            meet(folder, "training", "sampling")
        return run(self, *given, **options)

    PolicyUpdate.run = meeting  # type: ignore[method-assign]
    raise SystemExit(main(["train", *words[1:]]))


class OnBothNodes(Meeting):
    """Samples step 2 on two nodes at the same time.

    The environment of a node holds its name: `FLOWGRPO_RC_NODE` is `first` or `second`.
    """

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        node = os.environ["FLOWGRPO_RC_NODE"]
        if request.prompts.step == 2:
            meet(self._folder, node, "second" if node == "first" else "first")
        yield from DiffusersEngine.generate(self, request)


class OnTwoNodes(OnBothNodes):
    """Hangs in step 3 on the second node."""

    def generate(self, request: ImageRequest) -> Iterator[RolloutChunk]:
        if request.prompts.step == 3 and os.environ["FLOWGRPO_RC_NODE"] == "second":
            (self._folder / "hangs").touch()
            time.sleep(3600)
        yield from super().generate(request)
