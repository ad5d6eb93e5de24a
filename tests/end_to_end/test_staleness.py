"""Sampling with older weights: which weights sample what, resuming, failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Train, read_rows
from torch import Tensor

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.models.base import FlowModel, ModelConfig
from flowgrpo_rc.models.lora import add_lora, lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.records.rollout_files import load_rollout, rollout_path
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.training.update import PolicyUpdate

RC = "algorithm.rollout_correction"


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that updates are computed from, in their order."""
    batches: list[Batch] = []
    run = PolicyUpdate.run

    def recording(self: PolicyUpdate, batch: Batch, *rest: Any, **options: Any) -> Any:
        batches.append(batch)
        return run(self, batch, *rest, **options)

    monkeypatch.setattr(PolicyUpdate, "run", recording)
    return batches


def test_versions_and_decoupled_weights(
    train: Train, tmp_path: Path, model: FlowModel, trained_on: list[Batch]
) -> None:
    """Step s is sampled with the LoRA of step max(0, s - 2); weights are to that of s - 1."""
    settings = (
        "rollout.staleness=1",
        "rollout.merge_lora=false",
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_rollouts=true",
        "trainer.save_freq=1",
        "trainer.max_checkpoints_to_keep=9",
        f"{RC}.rollout_is=token",
        f"{RC}.rollout_is_threshold=1.0001",
    )
    assert train(*settings) == 0
    run = tmp_path / "run"
    network = add_lora(model, ModelConfig(path="x", lora_rank=4, lora_alpha=8), seed=42)
    policy = FlowPolicy(model, network)
    parameters = lora_parameters(network)
    checkpoints = list_checkpoints(run / "checkpoints")
    versions = [{name: parameter.detach().clone() for name, parameter in parameters.items()}]
    versions += [load_checkpoint(path).tensors["lora"] for path in checkpoints]

    def log_probs(batch: Batch, version: int) -> Tensor:
        for name, parameter in parameters.items():
            parameter.data.copy_(versions[version][name])
        return policy.log_probs(batch, 2)

    for step, row in enumerate(read_rows(run), start=1):
        batch, _, _ = load_rollout(rollout_path(run / "rollouts", step, 0, 1), torch.device("cpu"))
        version = max(0, step - 2)
        assert batch.policy_version.tolist() == [version] * 8
        assert row["rollout/policy_version_min"] == row["rollout/policy_version_max"] == version
        assert row["rollout/staleness_mean"] == row["rollout/staleness_max"] == step - 1 - version
        assert torch.equal(log_probs(batch, version), batch.rollout_log_probs)
        old = log_probs(batch, step - 1)
        used = trained_on[step - 1]
        assert torch.equal(used.old_log_probs, old)
        wanted = torch.exp(old.double() - batch.rollout_log_probs.double()).clamp(max=1.0001)
        torch.testing.assert_close(used.rollout_is_weights.double(), wanted, rtol=0, atol=1e-7)
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(wanted.mean().item(), abs=1e-7)
        assert (row["rollout_corr/logprob_abs_diff_max"] > 0) == (version < step - 1)


class Lagging(DiffusersEngine):
    """Does not take over the weights of step 1."""

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        if version != 1:
            super().sync_weights(state, version)


def test_weights_older_than_asked_for_end_the_run(
    train: Train, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("rollout.staleness=1", "trainer.total_training_steps=3")
    assert train(*settings, f"rollout.name={__name__}.Lagging") == 1
    words = "step 3 with the weights of step 0; rollout.staleness=1 asks for those of step 1"
    assert words in capsys.readouterr().err
    assert "rollout.staleness=1 without workers" in caplog.text
