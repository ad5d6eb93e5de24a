"""The commands from Python: in this process, with values and exceptions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from flowgrpo_rc.config.compose import compose_all, to_config
from flowgrpo_rc.config.from_python import (
    Overrides,
    check_callbacks,
    given_prompts,
    override_lines,
    public_call,
    silent,
    with_prompts,
)
from flowgrpo_rc.config.names import RATE
from flowgrpo_rc.config.rows import table
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.config.trust import check_plain, check_secrets, check_trusted
from flowgrpo_rc.libraries import quiet, set_allocator
from flowgrpo_rc.plugins import did_you_mean
from flowgrpo_rc.records.metrics_file import MetricsFile, held_out
from flowgrpo_rc.records.progress import SHOWN, ProgressBar, is_seen
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.streams import lasting_streams
from flowgrpo_rc.report.card import card, held_out_pictures, told
from flowgrpo_rc.report.compare import write_comparison
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.rewards.function import Score, give
from flowgrpo_rc.spec.check_settings import check_settings
from flowgrpo_rc.spec.machine import check_planned, machine_of_process
from flowgrpo_rc.spec.resolve import resolve
from flowgrpo_rc.spec.run_spec import Machine

if TYPE_CHECKING:
    from flowgrpo_rc.commands.evaluate import RunScores
    from flowgrpo_rc.commands.train import Callback
    from flowgrpo_rc.planning.fit import Proposal
    from flowgrpo_rc.planning.plan import Plan

# An override before the others: what they then say of rewards is theirs alone.
_NO_TERMS = "reward.terms={}"
RewardTerms = Mapping[str, Score | Mapping[str, object]] | Sequence[Score]


class Metrics(list[dict[str, Any]]):
    """Rows of metrics.jsonl, which a notebook shows as a table where pandas is installed."""

    def __repr__(self) -> str:
        last = {name: self[-1][name] for name in ("step", *SHOWN) if self and name in self[-1]}
        return f"<{len(self)} rows of metrics, the last with {last} and more; list() has all>"

    def to_pandas(self) -> Any:
        """Returns a DataFrame with a column a metric; ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(list(self))

    def _repr_html_(self) -> str | None:
        return self.to_pandas()._repr_html_() if find_spec("pandas") else None


@dataclass(frozen=True)
class Run:
    """A run's folder, finished or not, whether Python or the command line made it.

    Attributes:
      folder: the folder.
      stopped: why the training that returned this object ended early; None if it did not.
    """

    folder: Path
    stopped: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if the folder holds no run."""
        object.__setattr__(self, "folder", Path(self.folder))
        if not self._files.config.is_file():
            raise ValueError(f"{self.folder} is not the folder of a run: it has no config.yaml")

    def __repr__(self) -> str:
        reward, steps = told(self.folder)
        stopped = "" if self.stopped is None else f"; stopped early: {self.stopped}"
        numbers = f"{reward}; {steps}; LoRA: {self.lora}".replace("\u2192", "->")
        return f"<Run {self.folder}: {numbers}{stopped}>"

    def _repr_html_(self) -> str:
        return card(self.folder)

    @property
    def metrics(self) -> Metrics:
        """Returns the rows of metrics.jsonl: `step` and the metrics of the step by name.

        A value is None if it is not finite. `run.metrics.to_pandas()` makes a table of them.
        """
        return Metrics(MetricsFile(self._files.metrics).rows())

    @property
    def images(self) -> dict[str, list[Image.Image]]:
        """Returns the held-out pictures of the first and of the last evaluation.

        They are `before` and `after`, in the same order; either is absent without its evaluation.
        The `info` of a picture has its `subject`, the target or the prompt, and its `score`.
        """
        return held_out_pictures(self.folder)

    @property
    def before(self) -> dict[str, float]:
        """Returns the held-out metrics before training, such as `reward`; {} if there are none."""
        return next(iter(self._evaluations()), {})

    @property
    def after(self) -> dict[str, float]:
        """Returns the held-out metrics of the latest evaluation; {} if there are none."""
        return next(reversed(self._evaluations()), {})

    @property
    def warnings(self) -> list[str]:
        """Returns what the monitor warned of, in the order of the steps."""
        return [row["message"] for row in MetricsFile(self._files.health).rows()]

    @property
    def lora(self) -> Path:
        """Returns the folder of the LoRA, for `load_lora_weights` of a diffusers pipeline."""
        return self._files.lora

    def report(self) -> Path:
        """Writes the run's page anew and returns its path."""
        return write_report(self.folder)

    @public_call
    def resume(
        self,
        overrides: Overrides = (),
        *,
        rewards: RewardTerms | None = None,
        callbacks: Sequence[Callback] = (),
        verbose: bool | None = None,
        trust: bool = False,
    ) -> Run:
        """Goes on from the newest checkpoint, or from the start if there is none.

        `overrides` change the run's settings; `rewards`, `callbacks` and `verbose` are as in
        `train`, and functions of another session have to be given again. `trust` imports the code
        from outside of this package that the folder's config.yaml names.

        Raises:
          ValueError: the overrides would train something else, the settings cannot work, or the
            folder names code and is not trusted.
          CheckpointError: the checkpoint is damaged.
        """
        config = _stored(self.folder, overrides, rewards)
        check_plain(self._files.config)
        if not trust:
            check_trusted(self._files.config, _without_functions(config, rewards), "trust=True")
        check_secrets(config)
        place = replace(config.trainer, output_dir=str(self.folder), resume_mode="auto")
        return train(replace(config, trainer=place), callbacks=callbacks, verbose=verbose)

    @property
    def _files(self) -> RunFolder:
        return RunFolder(self.folder)

    def _evaluations(self) -> list[dict[str, float]]:
        return [held_out(row) for row in self.metrics if "val/reward" in row]


@public_call
def train(
    config: Overrides | Config = (),
    *,
    rewards: RewardTerms | None = None,
    callbacks: Sequence[Callback] = (),
    config_name: str | None = None,
    config_dir: str | None = None,
    verbose: bool | None = None,
) -> Run:
    """Trains in this process, as `flowgrpo-rc train` does with the same settings.

    It starts no processes: `trainer.num_processes=auto` is one here. Under torchrun every process
    calls it. A second run in the same folder goes on with the first, and Ctrl-C ends the run after
    the present step with its state saved, both as on the command line.

    Args:
      config: overrides, as `["rollout.n=8"]` or as `{"rollout.n": 8}`; or a whole `Config`. In a
        mapping `data.train_files` and `data.val_files` may be the prompts: a list of texts or of
        mappings, a `datasets.Dataset`, or the id of a dataset on the Hub, `user/name:train`. They
        are kept in the run's folder.
      rewards: name -> a function, as of (sample, prompt), or the mapping of `reward.terms.NAME`; or
        a list of functions. They take the place of the configured rewards. The weight of a function
        is 1, or `reward.terms.NAME.weight`.
      callbacks: each is called with the number and the metrics of every step, from the evaluation
        before the first one on. One that returns True ends the run after the step.
      config_name: a file of `configs/`; None for the bundled model.
      config_dir: a further folder with configuration files.
      verbose: True prints what the command line prints, and False nothing. None shows a progress
        bar on a terminal or in a notebook, and does as True elsewhere.

    Returns:
      The run.

    Raises:
      TypeError: there is no such argument.
      ValueError: the settings cannot work; nothing has been trained. The message names the key.
      CheckpointError: the checkpoint to go on from is damaged.
      RewardError: too many samples of a step have no reward.
      RuntimeError: the training failed.
    """
    check_callbacks(callbacks)
    set_allocator()
    settings = _settings(config, config_name, config_dir, rewards, verbose=bool(verbose))
    folder = Path(settings.trainer.output_dir)
    rows = MetricsFile(RunFolder(folder).metrics)
    earlier = len(rows.rows())
    with lasting_streams(), silent() if verbose is False else nullcontext():
        shows = verbose is None and is_seen()
        health = MetricsFile(RunFolder(folder).health)
        bar = ProgressBar(health, settings.trainer.total_training_steps) if shows else None
        with bar or nullcontext(), quiet("transformers", "diffusers"):
            from flowgrpo_rc.commands.train import run

            observers = [*([bar.step] if bar else ()), *callbacks]
            spec = resolve(settings, machine_of_process(settings))
            reason = run(spec, callbacks=observers, quiet=shows or verbose is False)
    if reason is None and len(rows.rows()) == earlier:
        warnings.warn(
            f"nothing was trained: {folder} holds a finished run; set trainer.output_dir to "
            "another folder for a new one",
            stacklevel=3,
        )
    return Run(folder, reason)


@public_call
def evaluate(
    run: Run | str | Path,
    overrides: Overrides = (),
    *,
    rewards: RewardTerms | None = None,
    suites: Sequence[str] = (),
    trust: bool = False,
) -> RunScores:
    """Scores the LoRA of a run, or of its folder, and the base model.

    `overrides` change the run's settings. `suites` are asked in place of the held-out prompts:
    names, `NAME:FILE` with other prompts, or files. `rewards` and `trust` are as in `Run.resume`.
    """
    from flowgrpo_rc.commands.finding import check_evaluated

    set_allocator()
    folder = _folder(run)
    config = _stored(folder, overrides, rewards)
    how = None if trust else "trust=True"
    check_evaluated(folder, _without_functions(config, rewards), suites, how)
    with lasting_streams(), quiet("transformers", "diffusers"):
        from flowgrpo_rc.commands.evaluate import evaluated

        return evaluated(folder, config, suites, quiet=True)


@public_call
def compare(*runs: Run | str | Path, out: str | Path = "compare.html") -> Path:
    """Writes a page about two to four runs, or folders of runs, and returns its path."""
    return write_comparison([_folder(run) for run in runs], Path(out))


@public_call
def plan(
    config: Overrides | Config = (),
    *,
    config_name: str | None = None,
    config_dir: str | None = None,
    processes: int = 1,
    nodes: int = 1,
    fit: float | str | None = None,
) -> Plan | Proposal:
    """Returns what a run of `train` would need on `processes`; `print` shows it as a table.

    With `fit`, the GiB of a card or "card" for the one here, it returns a `Proposal` with the
    `overrides` that fit it.
    """
    with quiet("transformers", "diffusers"):
        from flowgrpo_rc.commands.plan import planned

        check_planned(processes, nodes, RATE)
        settings = _settings(config, config_name, config_dir)
        spec = resolve(settings, Machine(torch.device("cuda"), processes))
        check_settings(spec)
        return planned(spec, nodes, fit)


@public_call
def export(
    run: Run | str | Path,
    out: str | Path,
    *,
    raw: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
) -> Path:
    """Writes the LoRA of a run or of a checkpoint's folder for stock diffusers, or peft.

    `raw` takes the last weights rather than their average. `push_to_hub` also uploads them to
    `user/name`, a private repository unless `public`. Returns the file with the tensors.
    """
    from flowgrpo_rc.commands.export import export_checkpoint

    place = str(_folder(run))
    return export_checkpoint(place, str(out), raw=raw, push_to_hub=push_to_hub, public=public)[0]


def _folder(run: Run | str | Path) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)


def _settings(
    config: Overrides | Config,
    config_name: str | None,
    config_dir: str | None,
    rewards: RewardTerms | None = None,
    *,
    verbose: bool = False,
) -> Config:
    """Composes the settings; prompts that are no paths are written into the run's folder."""
    if isinstance(config, Config):
        return _with_rewards(config, rewards, {})
    prompts = given_prompts(config)
    if isinstance(config, Mapping):
        config = {key: value for key, value in config.items() if key not in prompts}
    lines = [*([] if rewards is None else [_NO_TERMS]), *override_lines(config)]
    composition = compose_all(lines, config_name=config_name, config_dir=config_dir)
    if composition.rows and verbose:
        print(table(composition.rows), file=sys.stderr)
    composition.check()
    composed = to_config(composition.config)
    return with_prompts(_with_rewards(composed, rewards, composed.reward.terms), prompts)


def _stored(folder: Path, overrides: Overrides, rewards: RewardTerms | None) -> Config:
    """Returns the settings of a run with overrides and, if there are any, these rewards."""
    path = RunFolder(folder).config
    lines = override_lines(overrides, "overrides")
    overridden = stored_config(path, [_NO_TERMS, *lines]).reward.terms
    return _with_rewards(stored_config(path, lines), rewards, overridden)


def _with_rewards(
    config: Config, rewards: RewardTerms | None, overridden: Mapping[str, object]
) -> Config:
    """Returns the settings with these rewards; options that the settings give for them are kept.

    ValueError if `overridden`, the terms of overrides, names a reward that is left out.
    """
    if rewards is None:
        return config
    named = _named(rewards)
    for name, term in overridden.items():
        if term is not None and name not in named:
            raise ValueError(
                f"reward.terms.{name} is set{did_you_mean(name, [*named])}, but rewards= takes the "
                f"place of all rewards and has {', '.join(named)}: add {name!r} to rewards, or "
                "drop the setting"
            )
    terms: dict[str, object] = {}
    for name, reward in named.items():
        options = config.reward.terms.get(name) or {}
        if isinstance(reward, Mapping):
            terms[name] = {**reward, **options}
        else:
            terms[name] = {**options, "_target_": "function", "path": give(name, reward)}
    return replace(config, reward=replace(config.reward, terms=terms))


def _named(rewards: RewardTerms) -> Mapping[str, Score | Mapping[str, object]]:
    """Returns rewards by name; the functions of a list have their own."""
    if isinstance(rewards, Mapping):
        return rewards
    listed = rewards if isinstance(rewards, Sequence) else [rewards]
    named = {str(getattr(function, "__name__", "")): function for function in listed}
    if len(named) < len(listed) or not all(map(str.isidentifier, named)):
        raise ValueError(
            f"rewards={rewards!r}: each function of a list needs a name of its own, which a lambda "
            'has not; else give {"mine": function, "ocr": {"weight": 1}}'
        )
    return named


def _without_functions(config: Config, rewards: RewardTerms | None) -> Config:
    """Returns the settings without the rewards that are functions of the caller."""
    functions = [name for name, reward in _named(rewards or {}).items() if callable(reward)]
    terms = {name: term for name, term in config.reward.terms.items() if name not in functions}
    return replace(config, reward=replace(config.reward, terms=terms))
