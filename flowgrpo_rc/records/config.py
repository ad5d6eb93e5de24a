"""Settings of the run itself: how long it is, what it leaves, when and where."""

import math
import re
from dataclasses import dataclass, field

from flowgrpo_rc.distributed.sharding import STRATEGIES
from flowgrpo_rc.plugins import check_choice, check_least
from flowgrpo_rc.records.trackers import validate_loggers

AUTO = "auto"
_CHOICES = {
    "resume_mode": (AUTO, "disable"),
    "mixed_precision": ("no", "bf16"),
    "device": (AUTO, "cuda", "cpu"),
    "strategy": STRATEGIES,
}
_LEAST = {
    "total_training_steps": 1,
    "save_freq": 0,
    "test_freq": -1,
    "sample_freq": 0,
    "export_freq": 0,
    "max_checkpoints_to_keep": 1,
}


@dataclass(kw_only=True)
class TrainerConfig:
    """The run itself.

    total_training_steps: a step is one batch of samples.
    save_freq: steps between checkpoints; 0: only at the end.
    val_before_train: evaluate before the first step.
    test_freq: steps between evaluations, and one at the end; 0: only at the end; -1: never.
    sample_freq: steps between samples of the first four held-out prompts, besides those of
        evaluations, for the report and trackers; 0: none.
    patience: end the run after so many evaluations in a row without a better held-out reward; null:
        never.
    export_freq: steps between LoRAs for other programs, in lora/step_N; 0: only at the end, in
        lora/, and that of the best evaluation in lora_best/.
    suites: questions asked of the model in every evaluation besides, and of the base model once:
        names of suites, NAME:FILE for one with other prompts, or files of your own.
    max_checkpoints_to_keep: the oldest go first; that of the best evaluation stays besides.
    output_dir: the run's folder; the same command goes on where it stopped.
    project_name: for trackers.
    experiment_name: for trackers and the report.
    push_to_hub: user/name, a private repository of the Hub, for the LoRAs of export_freq, the last
        one, and the best in its lora_best/, in the background; what fails is warned of, and the run
        goes on. null: none.
    logger: where numbers go besides metrics.jsonl: any of console, wandb, tensorboard, trackio,
        swanlab, mlflow, aim.
    seed: of everything random.
    resume_mode: `auto` goes on from the newest whole checkpoint; `disable` refuses a folder that
        holds a run.
    max_time: seconds of this command, or a duration such as 2h or 90m, as for every time; then the
        run stops after the step with its state saved; null: no limit.
    device: `auto` takes the GPU where there is one; `cuda` is an error without one.
    num_processes: processes that `flowgrpo-rc train` starts on this machine; 1 starts none. `auto`:
        one for each core or GPU, as far as they share a mini-batch evenly; under a launcher, as
        many as it has started.
    mixed_precision: autocast of the training forward.
    deterministic: ask torch for kernels that give the same bits each time on a GPU, as they do on a
        CPU anyway. Not tried on a GPU yet.
    tf32: multiply fp32 matrices in TF32 on a GPU, in the rollout and in the update. A VAE that
        decodes in fp32 convolves in TF32 either way, unless `deterministic`. Not tried yet.
    save_rollouts: keep every step's trajectories in rollouts/, for `data.replay_dir` of another
        run.
    strategy: several processes hold a whole network each (`ddp`) or share the frozen weights
        (`fsdp2`); `auto` does what accelerate's configuration says.
    timeout_s: how long a process waits for another one before the run fails.
    """

    total_training_steps: int = 100
    save_freq: int = 20
    val_before_train: bool = True
    test_freq: int = 20
    sample_freq: int = 0
    patience: int | None = None
    export_freq: int = 0
    suites: list[str] = field(default_factory=list)
    max_checkpoints_to_keep: int = 2
    output_dir: str = "outputs/run"
    project_name: str = "flowgrpo_rc"
    experiment_name: str = "run"
    push_to_hub: str | None = None
    logger: list[str] = field(default_factory=lambda: ["console"])
    seed: int = 42
    resume_mode: str = "auto"
    max_time: float | None = None
    device: str = "auto"
    num_processes: int | str = 1
    mixed_precision: str = "no"
    deterministic: bool = False
    tf32: bool = False
    save_rollouts: bool = False
    strategy: str = "auto"
    timeout_s: float = 1800.0

    def validate(self) -> None:
        """Raises ValueError for a wrong setting."""
        for name, allowed in _CHOICES.items():
            check_choice(f"trainer.{name}", getattr(self, name), allowed)
        for name, least in _LEAST.items():
            check_least(f"trainer.{name}", getattr(self, name), least)
        number = self.num_processes
        is_number = number == AUTO or (isinstance(number, int) and number >= 1)
        repo = self.push_to_hub
        is_repo = repo is None or re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is not None
        seconds = "give a number of seconds above 0"
        freq = f"has no effect with trainer.test_freq={self.test_freq}: drop it or set trainer."
        for name, is_good, remedy in (
            ("num_processes", is_number, f"give {AUTO}, or a number of at least 1"),
            ("max_time", self.max_time is None or self.max_time > 0, f"{seconds}, or null"),
            ("timeout_s", 0 < self.timeout_s < math.inf, seconds),
            ("patience", self.patience is None or self.patience >= 1, "give at least 1, or null"),
            ("push_to_hub", is_repo, "write user/name or organization/name, or null"),
            ("patience", not self.patience or self.test_freq >= 1, f"{freq}test_freq to 1 or more"),
            ("suites", not self.suites or self.test_freq >= 0, f"{freq}test_freq to 0 or more"),
        ):
            if not is_good:
                raise ValueError(f"trainer.{name}={getattr(self, name)!r}: {remedy}")
        validate_loggers(self.logger)
