"""What a run uses of this machine: its device, as many processes as were launched or as the
settings ask for, and threads. No library of models is imported for it.
"""

import logging
import math
import os
import re
import sys
from pathlib import Path

import torch

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.child import launched_processes
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.records.config import AUTO
from flowgrpo_rc.records.rollout_files import recorded_processes
from flowgrpo_rc.spec.run_spec import Machine, gpus_per_worker, shares_evenly

KEY = "trainer.num_processes"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in a period, the period
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:Gi?B?)?", re.IGNORECASE)  # of a card's memory
logger = logging.getLogger(__name__)


def machine_here(config: Config) -> Machine:
    """Returns what this process uses: its device, and the processes that were launched with it."""
    return Machine(device_of(config), launched_processes() or 1)


def machine_of(config: Config) -> Machine:
    """Returns what the training command uses: its device, and the processes that it starts."""
    device = device_of(config)
    return Machine(device, num_processes(config, device))


def machine_of_process(config: Config) -> Machine:
    """Returns what a training in this process uses, which starts no others."""
    return Machine(device_of(config), processes_here(config))


def device_of(config: Config) -> torch.device:
    """Returns the kind of device that a run would use."""
    return device_named(config.trainer.device)


def check_planned(processes: int, nodes: int, tflops: float) -> None:
    """Raises ValueError for machines that no plan can be made for."""
    least = ": give at least 1"
    refuse(
        (nodes < 1, f"--nodes {nodes}{least}"),
        (processes < 1, f"--processes {processes}{least}"),
        (
            nodes > 0 and processes % nodes,
            f"--processes {processes} are not spread evenly over --nodes {nodes}",
        ),
        (
            not 0 < tflops < math.inf,
            f"--tflops {tflops}: give the rate of a card, above 0, such as 400",
        ),
    )


def in_gib(key: str, value: object) -> float:
    """Returns the memory of a card, a number or such as 24GB or 24GiB, both of which are 24."""
    size = _SIZE.fullmatch(str(value).strip())
    if not size or float(size[1]) == 0:
        raise ValueError(f"{key} {value}: give the GiB of a card, above 0, such as 24 or 24GB")
    return float(size[1])


def device_named(name: str) -> torch.device:
    """Returns the device for `trainer.device`: the GPU, or the CPU if there is no CUDA or it is
    `cpu`.

    Other accelerators are left alone: Apple's has no float64, which the metrics need. `cuda`
    without a GPU, and a driver that torch cannot use, are errors.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    # A driver that is too old for this torch looks the same as no GPU.
    has_driver = NVIDIA_DRIVER.is_file() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    refuse(
        (
            name == "cuda",
            "; install the driver or a torch for CUDA, or set trainer.device=auto (the CPU if "
            "there is no GPU) or cpu",
        ),
        (
            has_driver,
            ", though this machine has an NVIDIA driver; install a newer driver (`nvidia-smi` "
            "shows yours) or a torch for its CUDA from https://download.pytorch.org/whl, or set "
            "trainer.device=cpu",
        ),
        about=f"trainer.device={name}: torch {torch.__version__} is built for {built} and sees no "
        "GPU",
    )
    return torch.device("cpu")


def num_processes(config: Config, device: torch.device) -> int:
    """Returns how many processes share a step of the training command."""
    if launched_processes() is not None:
        return processes_here(config)
    for section in (config.rollout, config.actor, config.trainer):
        section.validate()
    number = config.trainer.num_processes
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else None
    if isinstance(number, int):
        if num_gpus is not None and number > num_gpus:
            raise ValueError(
                f"{KEY}={number}: one process drives one GPU, and {num_gpus} are visible; give at "
                f"most {num_gpus}, or {AUTO}"
            )
        if num_gpus is not None and number < num_gpus and config.rollout.workers == 0:
            logger.warning(
                f"{KEY}={number}: {num_gpus} GPUs are visible, and the others are not used; "
                f"{KEY}={AUTO} uses all that can share a step"
            )
        return number
    if config.data.replay_dir is not None:
        return recorded_processes(Path(config.data.replay_dir).expanduser())
    most = usable_cores() if num_gpus is None else num_gpus
    most = max(1, most - _taken_by_workers(config, device))
    return max(number for number in range(1, most + 1) if shares_evenly(config, number))


def _taken_by_workers(config: Config, device: torch.device) -> int:
    """Returns how many cores or GPUs of this machine are for its rollout workers."""
    rollout = config.rollout
    if rollout.ray_address is not None:
        return 0
    if device.type == "cpu":
        return rollout.workers * rollout.cpus_per_worker
    return math.ceil(rollout.workers * gpus_per_worker(config, device))


def processes_here(config: Config) -> int:
    """Returns how many processes share a step of a run in this process."""
    number = config.trainer.num_processes
    launched = launched_processes()
    if number in (AUTO, 1, launched):
        return launched or 1
    why = f", but the launcher has started {launched} (WORLD_SIZE): drop one of the two"
    if launched is None:
        why = ": only the command `flowgrpo-rc train` starts processes; set it to 1"
    raise ValueError(f"{KEY}={number}{why}")


def limit_threads(*, quiet: bool = False) -> None:
    """Lets a process that is alone use no more threads than are safe on this machine, and says so.

    On two cores that is one thread: two wait for each other whenever another program uses a core.
    Beside one busy core two threads do 3 forwards and backwards of the bundled model a second and
    one does 7.7; on idle cores they do 11 and 8.5. OMP_NUM_THREADS overrules this.
    """
    if launched_processes() is not None or "OMP_NUM_THREADS" in os.environ:
        return
    cores = usable_cores()
    threads = cores if cores > 2 else 1
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        if not quiet:
            print(
                f"note: {threads} thread(s) for {cores} cores, so that threads do not wait for "
                "each other; OMP_NUM_THREADS sets another number"
            )


def usable_cores() -> int:
    """Returns how many processes of OMP_NUM_THREADS threads the cores of this process can serve."""
    every = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else every
    if CPU_QUOTA.is_file():
        quota, period = CPU_QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, cores // max(1, int(threads))) if threads.isdigit() else max(1, cores)
