"""The recipe of a run: its settings, which have been checked, become a trainer."""

import dataclasses
from functools import partial
from typing import Any

from flowgrpo_rc.assembly.algorithm import make_algorithm
from flowgrpo_rc.assembly.processes import make_log
from flowgrpo_rc.assembly.source import make_source
from flowgrpo_rc.assembly.task import make_task, shard
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.evaluation.held_out import Evaluator
from flowgrpo_rc.evaluation.suite import Suite
from flowgrpo_rc.evaluation.suite_runner import SuiteRunner
from flowgrpo_rc.models.lora import lora_parameters, reference_policy
from flowgrpo_rc.monitoring.expected_mismatch import unquantized_share
from flowgrpo_rc.monitoring.health import HealthMonitor
from flowgrpo_rc.monitoring.health_rules import Setup
from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.rejected import RejectedSamples
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.run_log import RunLog
from flowgrpo_rc.rewards.manager import RewardManager
from flowgrpo_rc.spec.check_folder import check_output
from flowgrpo_rc.spec.check_inputs import Prompts
from flowgrpo_rc.spec.run_spec import RunSpec
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.first_pass import encode_ahead
from flowgrpo_rc.training.journal import Journal
from flowgrpo_rc.training.state import RunState
from flowgrpo_rc.training.tasks.task import Task
from flowgrpo_rc.training.trainer import Trainer
from flowgrpo_rc.training.update import PolicyUpdate


def assemble(
    spec: RunSpec,
    folder: RunFolder,
    processes: Processes,
    prompts: Prompts,
    *,
    first_step: int,
    log: RunLog | None = None,
) -> Trainer:
    """Loads the model and makes the trainer of a run, whose settings have been checked."""
    config = spec.config
    log = log or make_log(config, folder, processes, first_step=first_step)
    sampler, held_out, suites = prompts

    task = make_task(spec, processes)
    network = task.model.network
    if config.model.prompt_cache is not None:
        steps = range(max(1, first_step), config.trainer.total_training_steps + 1)
        encode_ahead(task, prompts, processes, steps, config.actor.ppo_mini_batch_size)
    check_output(config, sum(p.numel() for p in lora_parameters(network).values()))
    rewards = RewardManager(config.reward, spec.rewards)
    # An engine that copies the network has to see it whole, before it is sharded.
    samples_here = config.data.replay_dir is None and config.rollout.workers == 0
    copied = samples_here and spec.engine_class.copies_network
    if not copied:
        shard(config, network, processes)
    source = make_source(spec, task, sampler, rewards, processes, first_step=first_step)
    if copied:
        shard(config, network, processes)

    algorithm = make_algorithm(spec, task, processes)
    update = PolicyUpdate(algorithm, config.actor, processes, total_updates=spec.total_updates)
    health = make_health(spec)
    rejected = RejectedSamples(config.algorithm.rollout_correction, spec.rules, processes.count)
    best = BestEvaluation(MetricsFile(folder.metrics).rows())
    keep = config.trainer.max_checkpoints_to_keep
    return Trainer(
        config=config.trainer,
        processes=processes,
        task=task,
        source=source,
        rewards=rewards,
        algorithm=algorithm,
        advantages=AdvantageEstimator(
            config.algorithm,
            rewards.weights,
            None if config.rollout.redraw else spec.trained_n,
            processes.sum,
        ),
        update=update,
        mini_batch_size=spec.samples_per_mini_batch,
        may_be_stale=config.rollout.staleness > 0,
        evaluator=Evaluator(task.sample, held_out, config.rollout.val_kwargs, rewards),
        suites=[make_suite(suite, spec, task) for suite in suites],
        state=RunState(folder.checkpoints, keep, processes, update, algorithm, health, source),
        journal=Journal(folder, log, health, rejected, processes, best),
    )


def make_suite(suite: Suite, spec: RunSpec, task: Task) -> SuiteRunner:
    """Makes what asks a suite of the task's model, and of it without its LoRA."""
    config = spec.config
    suite_task: Any = task  # a dataclass, which keeps prompts encoded as its sampler needs them
    if suite.sampler:
        suite_task = dataclasses.replace(suite_task, config=suite.applied(config.rollout))
    return SuiteRunner(
        suite,
        suite_task.sample,
        partial(reference_policy, task.model.network),
        batch_size=config.rollout.val_kwargs.batch_size,
        protocol=suite.protocol(config.rollout, text=spec.is_text),
    )


def make_health(spec: RunSpec) -> HealthMonitor:
    """Makes what watches the metrics and warns."""
    dtype = spec.trained_rollout.spec().dtype
    precisions = (dtype, spec.config.model.dtype, spec.config.trainer.mixed_precision)
    setup = Setup.of(
        spec.correction,
        spec.rules,
        text=spec.is_text,
        fresh=spec.fresh,
        unquantized=unquantized_share(*precisions),
    )
    return HealthMonitor(setup)
