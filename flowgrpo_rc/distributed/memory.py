"""Memory: what a host has left, and which phase of a run lacks some, and what makes it smaller."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UPDATE = "actor.ppo_micro_batch_size_per_gpu"
_ROLLOUT = "rollout.micro_batch_size_per_gpu"
_FORMATS = "model.dtype=bf16, model.quantization, rollout.dtype=bf16 or rollout.quantization"
# Phase of a run, as in `timing_s/*` -> what to change.
_REMEDIES = {
    "loading": f"try {_FORMATS}, and at last model.offload_idle=layers",
    "rollout": f"lower {_ROLLOUT}, or try {_FORMATS}",
    "evaluation": "lower rollout.val_kwargs.batch_size",
    "old_log_prob": f"lower {_UPDATE}",
    "update": f"lower {_UPDATE} or actor.steps_per_forward, or set "
    "model.gradient_checkpointing=true",
}


class OutOfMemory(RuntimeError):
    """A phase of the run, as in `timing_s/*`, lacks memory; the message says what to change."""

    def __init__(self, phase: str, error: BaseException) -> None:
        lines = str(error).splitlines()
        super().__init__(
            f"out of memory in {phase}: {_REMEDIES.get(phase, f'lower {_ROLLOUT} or {_UPDATE}')}. "
            "`flowgrpo-rc plan` computes what needs how much. "
            f"({lines[0] if lines else type(error).__name__})"
        )


@contextmanager
def out_of_memory_in(phase: str) -> Iterator[None]:
    """Turns an error for want of memory into `OutOfMemory` of a phase; the innermost one counts."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from accelerate.utils.memory import should_reduce_batch_size

        lacks_memory = isinstance(error, MemoryError) or should_reduce_batch_size(error)
        if isinstance(error, OutOfMemory) or not lacks_memory:
            raise
        raise OutOfMemory(phase, error) from error


def free_host_gib(system: Path = Path("/")) -> float:
    """Returns the GiB that the host can give, within the limits of a container or a job."""
    lines = (system / "proc/meminfo").read_text().splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for line in (system / "proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        folder = system / "sys/fs/cgroup" / controllers / place[1:]
        # The second version of control groups, and the first.
        for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            for group in (folder, *folder.parents):
                free += _left(group / f"memory.{limit}", group / f"memory.{used}")
    return max(0, min(free)) / 2**30


def _left(limit: Path, used: Path) -> list[int]:
    """Returns what a limit leaves, if there is one; a cache of files gives way."""
    most = limit.read_text().strip() if limit.is_file() else "max"
    if most == "max":
        return []
    numbers = dict(map(str.split, limit.with_name("memory.stat").read_text().splitlines()))
    cached = int(numbers["active_file"]) + int(numbers["inactive_file"])
    return [int(most) - int(used.read_text()) + cached]
