"""In a micro-batch of each family only planted waits are found, in its forward and in its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.marks import slow_but
from support.runs import VIDEO
from support.tagged_runs import ONE_STEP, train, waits
from support.tiny_models import TINY
from torch import Tensor

from flowgrpo_rc.algorithms.policy_gradient.objective import Objective
from flowgrpo_rc.models.base import adapters_by_pipeline

# In bypass mode, and in decoupled mode; both with a correction.
KINDS = {
    "unguided": (),
    "guided": ("algorithm.rollout_correction=decoupled_token_is", "actor.use_kl_loss=true"),
}
# Functions of diffusers' own forwards: it sends the length of a masked text, which nobody reads.
SENT = {"transformer_qwenimage.py: compute_text_seq_len_from_mask"}
OF_DIFFUSERS = {"QwenImagePipeline": SENT, "QwenImageEditPlusPipeline": SENT}


def plant(patch: pytest.MonkeyPatch, owner: Any, function: str) -> None:
    own = getattr(owner, function)

    def planted(*args: Any) -> Any:
        next(value for value in args if isinstance(value, Tensor)).sum().item()
        return own(*args)

    planted.__code__ = planted.__code__.replace(co_name=f"planted in {function}")
    patch.setattr(owner, function, planted)


# On a CPU, of a layer norm whose weights stay in fp32.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", slow_but(["guided"], KINDS))
@pytest.mark.parametrize("name", slow_but(["FluxPipeline"], sorted(adapters_by_pipeline())))
def test_only_planted_waits_are_found(saved, tmp_path, monkeypatch, name, kind):
    plant(monkeypatch, adapters_by_pipeline()[name], "velocity")
    plant(monkeypatch, Objective, "terms")
    tiny = TINY[name]
    pipeline = dict(vars(tiny)[kind]) | ({"num_frames": 5} if tiny.num_frames else {})
    run = (
        *(*ONE_STEP, *KINDS[kind], *(VIDEO if tiny.num_frames else ())),
        *(f"rollout.pipeline.{key}={value}" for key, value in pipeline.items()),
        *(f"model.path={saved(name)}", "model.target_modules=null"),
        # One forward has steps on both sides of the boundary of two transformers.
        *("rollout.algo.sde_window_size=3", "actor.steps_per_forward=null"),
    )
    found = {f"{Path(__file__).name}: planted in {place}" for place in ("velocity", "terms")}
    assert waits(train(tmp_path, run)) == found | OF_DIFFUSERS.get(name, set())
