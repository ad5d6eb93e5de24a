"""Numbers that are not finite, at every place where they may come up, reach no checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from support.faults import (
    Trained,
    command,
    fault,
    has_nan,
    nth_call,
    recorded,
    replace_file,
    some,
    words_of,
)
from support.runs import final_state, read_rows

from flowgrpo_rc.algorithms.policy_gradient.algorithm import PolicyGradient
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.training.update import PolicyUpdate


def spoil_moment(optimizer: torch.optim.AdamW, found: Any) -> Any:
    next(iter(optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = math.nan
    return found


def spoil_weight(optimizer: torch.optim.AdamW, found: Any) -> Any:
    optimizer.param_groups[0]["params"][3].data.view(-1)[1] = math.inf
    return found


def spoil_average(ema: EMAModel, found: Any) -> Any:
    ema.shadow_params[0].view(-1)[0] = math.nan
    return found


def spoil_gradient(update: PolicyUpdate, found: Any) -> Any:
    update.parameters[0].grad.view(-1)[0] = math.nan
    return found


def infinite_loss(algorithm: PolicyGradient, found: Any) -> Any:
    """Makes a loss infinite whose gradient is finite."""
    return found._replace(terms=found.terms._replace(total=found.terms.total + math.inf))


def log_probs_of(value: float, count: int) -> Callable[[Any, Any], Iterator[Any]]:
    """Returns a change of `generate`: the first samples of a chunk get other log-probs."""

    def change(batch: Any) -> dict[str, Any]:
        log_probs = batch.rollout_log_probs.clone()
        log_probs[:count] = value
        return {"rollout_log_probs": log_probs}

    return recorded(change)


STATE = {
    "a moment": (torch.optim.AdamW, "step", 3, spoil_moment),
    "a weight": (torch.optim.AdamW, "step", 3, spoil_weight),
    "an average": (EMAModel, "step", 1, spoil_average),
}


@fault(
    "a weight, moment or average becomes NaN",
    "the run stops, names the step and the last good checkpoint, and saves none of it",
)
@pytest.mark.parametrize("site", some(list(STATE), 2))
def test_a_spoiled_state_is_not_saved(
    small: list[str], tmp_path: Path, whole: Trained, site: str
) -> None:
    run = tmp_path / "run"
    words = words_of(small)
    ended = command(*words, harm=nth_call(*STATE[site])).expect(1)
    assert re.search(r"step 2: updates up to [34] have left", ended.output)
    assert "the last good checkpoint is step_1" in ended.output
    assert has_nan(run) == []
    (bundle,) = (run / "debug").iterdir()
    content = json.loads(bundle.read_text())
    assert "nan" in content["norms"].values() or "inf" in content["norms"].values()
    assert len(content["samples"]["seed"]) == 8
    command(*words).expect(0)
    assert final_state(run) == whole.state


@fault("a weight becomes NaN and the debug bundle cannot be written", "the line still says why")
def test_a_bundle_that_is_refused(small: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "debug").touch()  # no folder
    command(*words_of(small), harm=nth_call(*STATE["a weight"])).expect(
        1, "have left", "could not be written"
    )


@fault("a checkpoint of NaN weights", "it is passed over for the one before, and kept aside")
def test_a_checkpoint_that_holds_nan_is_passed_over(finished: Path, small: list[str]) -> None:
    folder = finished / "checkpoints"
    before = load_file(folder / "step_3" / "lora.safetensors")
    spoilt = {name: torch.full_like(tensor, math.nan) for name, tensor in before.items()}
    replace_file(folder / "step_3", "lora.safetensors", partial(save_file, spoilt))
    command(*words_of(small)).expect(0, "damaged_step_3")
    again = load_file(folder / "step_3" / "lora.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


UPDATES = {
    "gradient": (PolicyUpdate, "_divide_gradients", spoil_gradient),
    "loss": (PolicyGradient, "_seen", infinite_loss),
}


@fault("a gradient is NaN, or a loss infinite", "the update is skipped and counted")
@pytest.mark.parametrize("site", UPDATES)
def test_one_update(small: list[str], tmp_path: Path, site: str) -> None:
    owner, name, change = UPDATES[site]
    command(*words_of(small), harm=nth_call(owner, name, 2, change)).expect(0)
    assert has_nan(tmp_path / "run") == []
    assert read_rows(tmp_path / "run")[-1]["actor/nonfinite_updates"] == 1


@fault("that happens in every update", "the run stops with the step, the reason and a debug bundle")
@pytest.mark.parametrize("site", some(list(UPDATES)))
def test_all_updates(small: list[str], tmp_path: Path, site: str) -> None:
    owner, name, change = UPDATES[site]
    command(*words_of(small), harm=nth_call(owner, name, -1, change)).expect(
        1, "step 3: the gradient was not finite in 5 updates in a row"
    )
    assert has_nan(tmp_path / "run") == []
    assert (tmp_path / "run" / "debug").is_dir()


@fault("that happens in every update of a short run", "it fails in words, and leaves no LoRA")
def test_all_updates_of_a_short_run(small: list[str], tmp_path: Path) -> None:
    words = words_of(small, "trainer.total_training_steps=1", "actor.ema.enable=false")
    harm = nth_call(PolicyUpdate, "_divide_gradients", -1, spoil_gradient)
    told = "step 1: every update of the run (2) was skipped"
    for _ in range(2):  # nor does the same command find a run that is finished
        command(*words, harm=harm).expect(1, told)
    assert not (tmp_path / "run" / "lora").exists()


@fault("the engine records log-probs that are not finite", "nothing is trained on them; no NaN")
@pytest.mark.parametrize(("count", "value", "bypass"), [(2, -math.inf, False), (8, math.nan, True)])
def test_log_probs(
    small: list[str], tmp_path: Path, count: int, value: float, bypass: bool
) -> None:
    """8 are all samples of a step: such a run may stop."""
    words = words_of(small, f"algorithm.rollout_correction.bypass_mode={bypass}")
    harm = nth_call(DiffusersEngine, "generate", -1, log_probs_of(value, count))
    ended = command(*words, harm=harm)
    assert ended.code in ((0,) if count < 8 else (0, 1)), ended.output
    assert "Traceback" not in ended.output
    assert has_nan(tmp_path / "run") == []
