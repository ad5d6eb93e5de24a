"""Makes what the processes of a run share and write: accelerate, the console, the log."""

import dataclasses
import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.distributed.numerics import set_numerics
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.distributed.sharding import resolve_strategy
from flowgrpo_rc.records.console import Console
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import Observer, RunLog
from flowgrpo_rc.records.speed import SpeedWatch
from flowgrpo_rc.records.trackers import Trackers, accelerate_loggers
from flowgrpo_rc.spec.machine import device_of, limit_threads


def make_processes(config: Config, *, quiet: bool = False) -> Processes:
    """Returns accelerate's view of this process, on the device of `device_of`.

    ValueError if an earlier run of this Python session had another device or mixed precision, which
    accelerate keeps for the whole session.
    """
    resolve_strategy(config.trainer.strategy)
    on_cpu = device_of(config).type == "cpu"
    set_numerics(deterministic=config.trainer.deterministic, tf32=config.trainer.tf32)
    if on_cpu:
        limit_threads(quiet=quiet)
    try:
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=config.trainer.mixed_precision,
            log_with=accelerate_loggers(config.trainer.logger) or None,
            project_dir=config.trainer.output_dir,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(seconds=config.trainer.timeout_s))
            ],
        )
    except ValueError as error:
        raise ValueError(
            f"trainer.mixed_precision={config.trainer.mixed_precision}, "
            f"trainer.device={config.trainer.device}: accelerate refuses them ({error})"
        ) from error
    if not accelerator.is_main_process:
        logging.getLogger("flowgrpo_rc").setLevel(logging.ERROR)
    return Processes(accelerator)


def make_console(config: Config, processes: Processes, *, quiet: bool = False) -> Console:
    """Makes what tells the user of the run: on the main process, and there unless `quiet`."""
    return Console(
        total_steps=config.trainer.total_training_steps,
        quiet=quiet or not processes.is_main,
        show_steps="console" in config.trainer.logger,
    )


def make_log(
    config: Config,
    folder: RunFolder,
    processes: Processes,
    *,
    first_step: int,
    console: Console | None = None,
    observers: Sequence[Observer] = (),
) -> RunLog:
    """Makes what writes the numbers of a step down, and calls the observers on the main process."""
    trackers = Trackers(
        processes.accelerator,
        project_name=config.trainer.project_name,
        experiment_name=config.trainer.experiment_name,
        run_dir=folder.root,
        config=dataclasses.asdict(config),
        first_step=first_step,
    )
    on_cpu = processes.device.type == "cpu"
    speed = SpeedWatch(torch.get_num_threads() if on_cpu else None)
    console = console or make_console(config, processes)
    return RunLog(folder, console, trackers, speed, observers)
