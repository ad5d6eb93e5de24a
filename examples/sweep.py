"""Searches learning rate and group size with Optuna: `pip install optuna`, then

    python examples/sweep.py 20 trainer.total_training_steps=40

The number is that of trials; overrides of each may follow.
"""

from __future__ import annotations

import sys
from typing import Any

import optuna

import flowgrpo_rc


def main(trials: str = "20", *overrides: str) -> optuna.Study:
    """Trains once for each trial; ends a trial that is behind the others at the same step."""

    def held_out_reward(trial: optuna.Trial) -> float:
        def is_behind(step: int, metrics: dict[str, Any]) -> bool:
            if "val/reward" in metrics:
                trial.report(metrics["val/reward"], step)
            return trial.should_prune()

        chosen = [
            f"actor.optim.lr={trial.suggest_float('lr', 1e-4, 1e-2, log=True)}",
            f"rollout.n={trial.suggest_categorical('n', [8, 12, 16])}",
            f"trainer.output_dir=outputs/sweep/{trial.number}",
        ]
        return flowgrpo_rc.train([*chosen, *overrides], callbacks=[is_behind]).after["reward"]

    study = optuna.create_study(direction="maximize")
    study.optimize(held_out_reward, int(trials))
    return study


if __name__ == "__main__":
    print(main(*sys.argv[1:]).best_trial)
