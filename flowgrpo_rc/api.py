"""Training from Python: what `flowgrpo-rc train` does, in this process and with exceptions."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo_rc.config.compose import compose_all, unchecked_config
from flowgrpo_rc.config.rows import table
from flowgrpo_rc.config.tree import Config, stored_config
from flowgrpo_rc.config.trust import check_plain, check_secrets, check_trusted
from flowgrpo_rc.files import write_atomic
from flowgrpo_rc.libraries import quiet
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.streams import lasting_streams
from flowgrpo_rc.report.run import write_report
from flowgrpo_rc.rewards.function import Score, give

if TYPE_CHECKING:
    from flowgrpo_rc.commands.train import Callback

Overrides = Sequence[str] | Mapping[str, Any]
RewardTerms = Mapping[str, Score | Mapping[str, Any]] | Sequence[Score]
# A word that Hydra reads as the text that it is.
_PLAIN_TEXT = re.compile(r"(?!(null|true|false|inf|nan)$)[A-Za-z][\w/.:-]*", re.IGNORECASE)
_HELD_OUT = "val/"


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

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl: `step` and the metrics of the step by name.

        A value is None if it is not finite. `pandas.DataFrame(run.metrics)` makes a table of them.
        """
        return MetricsFile(self._files.metrics).rows()

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

    def resume(
        self,
        overrides: Sequence[str] = (),
        *,
        rewards: RewardTerms | None = None,
        callbacks: Sequence[Callback] = (),
        verbose: bool = False,
        trust: bool = False,
    ) -> Run:
        """Goes on from the newest checkpoint, or from the start if there is none.

        Args:
          overrides: changes to the run's settings, such as `trainer.max_time=3600`.
          rewards: as in `train`; needed in a new Python session if the run's rewards are functions
            of the old one.
          callbacks: as in `train`.
          verbose: as in `train`.
          trust: import the code from outside of this package that the folder's config.yaml names.

        Raises:
          ValueError: the overrides would train something else, the settings cannot work, or the
            folder names code and is not trusted.
          CheckpointError: the checkpoint is damaged.
        """
        config = stored_config(self._files.config, overrides)
        check_plain(self._files.config)
        if rewards is not None:
            config = _with_rewards(config, rewards)
        if not trust:
            check_trusted(self._files.config, _without_functions(config, rewards), "trust=True")
        check_secrets(config)
        place = replace(config.trainer, output_dir=str(self.folder), resume_mode="auto")
        return train(replace(config, trainer=place), callbacks=callbacks, verbose=verbose)

    @property
    def _files(self) -> RunFolder:
        return RunFolder(self.folder)

    def _evaluations(self) -> list[dict[str, float]]:
        return [
            {
                name.removeprefix(_HELD_OUT): value
                for name, value in row.items()
                if name.startswith(_HELD_OUT)
            }
            for row in self.metrics
            if f"{_HELD_OUT}reward" in row
        ]


def train(
    config: Overrides | Config = (),
    *,
    rewards: RewardTerms | None = None,
    callbacks: Sequence[Callback] = (),
    config_name: str | None = None,
    config_dir: str | None = None,
    verbose: bool = False,
) -> Run:
    """Trains in this process, as `flowgrpo-rc train` does with the same settings.

    It starts no processes: `trainer.num_processes=auto` is one here. Under torchrun every process
    calls it. A second run in the same folder goes on with the first, and Ctrl-C ends the run after
    the present step with its state saved, both as on the command line.

    Args:
      config: overrides, as `["rollout.n=8"]` or as `{"rollout.n": 8}`; or a whole `Config`. In a
        mapping `data.train_files` and `data.val_files` may be rows, as a list of mappings or as a
        `datasets.Dataset`; they are kept in the run's folder.
      rewards: name -> a function, as of (sample, prompt), or the mapping of `reward.terms.NAME`; or
        a list of functions. They take the place of the configured rewards. The weight of a function
        is 1, or `reward.terms.NAME.weight`.
      callbacks: each is called with the number and the metrics of every step, from the evaluation
        before the first one on. One that returns True ends the run after the step.
      config_name: a file of `configs/`; None for the bundled model.
      config_dir: a further folder with configuration files.
      verbose: print what the command line prints.

    Returns:
      The run.

    Raises:
      ValueError: the settings cannot work; nothing has been trained. The message names the key.
      CheckpointError: the checkpoint to go on from is damaged.
      RewardError: too many samples of a step have no reward.
      RuntimeError: the training failed.
    """
    if isinstance(config, Config):
        settings = config
    else:
        prompts = _rows(config)
        if isinstance(config, Mapping):
            config = {key: value for key, value in config.items() if key not in prompts}
        lines = override_lines(config)
        composition = compose_all(lines, config_name=config_name, config_dir=config_dir)
        if composition.rows and verbose:
            print(table(composition.rows), file=sys.stderr)
        composition.check()
        settings = _with_prompts(unchecked_config(composition.config), prompts)
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise ValueError(f"callbacks={callbacks!r}: give a list of functions (step, metrics)")
    if rewards is not None:
        settings = _with_rewards(settings, rewards)
    folder = Path(settings.trainer.output_dir)
    rows = MetricsFile(RunFolder(folder).metrics)
    earlier = len(rows.rows())
    with lasting_streams(), quiet("transformers", "diffusers"):
        from flowgrpo_rc.commands.train import run

        reason = run(settings, callbacks=callbacks, quiet=not verbose)
    if reason is None and len(rows.rows()) == earlier:
        warnings.warn(
            f"nothing was trained: {folder} holds a finished run; set trainer.output_dir to "
            "another folder for a new one",
            stacklevel=2,
        )
    return Run(folder, reason)


def _rows(overrides: Overrides) -> dict[str, str]:
    """Returns prompts that are rows, and not paths, as lines of JSON by the name of their key."""
    found = {}
    for key in ("data.train_files", "data.val_files"):
        given = overrides.get(key) if isinstance(overrides, Mapping) else None
        if given is None or isinstance(given, str | Path):
            continue
        rows = list(given)
        if any(isinstance(row, Mapping) for row in rows):
            try:
                found[key] = "\n".join(json.dumps(dict(row), ensure_ascii=False) for row in rows)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{key}: its rows must be mappings of plain data: {error}"
                ) from error
    return found


def _with_prompts(config: Config, prompts: Mapping[str, str]) -> Config:
    """Writes prompts into the run's folder and returns the settings with their files."""
    data = replace(config.data)
    for key, lines in prompts.items():
        name = key.removeprefix("data.")
        file = Path(config.trainer.output_dir).expanduser() / "prompts" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, lines.encode())
        setattr(data, name, str(file))
    return replace(config, data=data)


def override_lines(overrides: Overrides) -> list[str]:
    """Returns overrides as the command line has them.

    Args:
      overrides: lines, or values by dotted key. A text is taken as it is, whatever it holds.

    Raises:
      ValueError: one text in place of a list, or a value that no setting can have.
    """
    if isinstance(overrides, str):
        raise ValueError(f"config={overrides!r}: give a list of overrides, such as [{overrides!r}]")
    if isinstance(overrides, Mapping):
        return [f"{key}={_written(key, value)}" for key, value in overrides.items()]
    return list(overrides)


def _written(key: str, value: Any) -> str:
    """Returns a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str | Path):
        text = str(value)
        if _PLAIN_TEXT.fullmatch(text):
            return text
        # Hydra unescapes backslashes only in front of a quote or at the end.
        escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        inner = ",".join(f"{name}:{_written(key, item)}" for name, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, Sequence):
        inner = ",".join(_written(key, item) for item in value)
        return f"[{inner}]"
    raise ValueError(
        f"{key}={value!r}: a setting is a text, a number, true or false, null, a list or a mapping"
    )


def _with_rewards(config: Config, rewards: RewardTerms) -> Config:
    """Returns the settings with these rewards; options that the settings give for them are kept."""
    terms: dict[str, Any] = {}
    for name, given in _named(rewards).items():
        kept = config.reward.terms.get(name) or {}
        if isinstance(given, Mapping):
            terms[name] = {**given, **kept}
        else:
            terms[name] = {**kept, "_target_": "function", "path": give(name, given)}
    return replace(config, reward=replace(config.reward, terms=terms))


def _named(rewards: RewardTerms) -> Mapping[str, Score | Mapping[str, Any]]:
    """Returns rewards by name; the functions of a list have their own."""
    if isinstance(rewards, Mapping):
        return rewards
    listed = rewards if isinstance(rewards, Sequence) else [rewards]
    named = {str(getattr(function, "__name__", "")): function for function in listed}
    if len(named) < len(listed) or not all(map(str.isidentifier, named)):
        raise ValueError(f'rewards={rewards!r}: give them by name, such as {{"mine": function}}')
    return named


def _without_functions(config: Config, rewards: RewardTerms | None) -> Config:
    """Returns the settings without the rewards that are functions of the caller."""
    functions = [name for name, given in _named(rewards or {}).items() if callable(given)]
    terms = {name: term for name, term in config.reward.terms.items() if name not in functions}
    return replace(config, reward=replace(config.reward, terms=terms))
