"""Training again on earlier samples: which, when, with what; resuming; what stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Train, fingerprint, read_rows, without_timings

from flowgrpo_rc.batch import Batch
from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_config, to_config
from flowgrpo_rc.correction import auto_bands as auto_bands
from flowgrpo_rc.losses import auto_clip
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.training.update import PolicyUpdate

RC = "algorithm.rollout_correction"
AUTO = (f"{RC}.rollout_rs=[token_k1,step_kl]", f"{RC}.rollout_rs_threshold=auto:1")
BYPASS = (f"{RC}.bypass_mode=true", "rollout.dtype=bf16", *AUTO)
DECOUPLED = (f"{RC}.bypass_mode=false", f"{RC}.rollout_is=token", "rollout.dtype=bf16", *AUTO)
OWN_FORWARDS = (*DECOUPLED, f"{RC}.exclude_rejected=false")
CENTERED = (*BYPASS, f"{RC}.centered=true", "actor.diffusion_loss.clip_ratio=auto:4")
TEXT = (
    "data.train_batch_size=2",
    "rollout.n=4",
    "rollout.val_kwargs.n=4",
    "rollout.micro_batch_size_per_gpu=8",
    "actor.ppo_mini_batch_size=1",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.device=cpu",
)


@pytest.fixture(autouse=True)
def _warm_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets what follows the mismatch act from the second step on."""
    monkeypatch.setattr(auto_bands, "WARM_UP", 4)
    monkeypatch.setattr(auto_clip, "WARM_UP", 4)


def train_text(folder: Path, *further: str) -> int:
    command = ["train", "--config-name", "token_grpo", *TEXT]
    return main([*command, f"trainer.output_dir={folder}", *further])


@pytest.fixture
def minis(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The mini-batches that updates are computed from, in their order, as they go in."""
    found: list[Batch] = []
    mini_batch = PolicyUpdate._mini_batch

    def noted(self: PolicyUpdate, mini: Batch, metrics: Any) -> Batch:
        trained = mini_batch(self, mini, metrics)
        found.append(trained)
        return trained

    monkeypatch.setattr(PolicyUpdate, "_mini_batch", noted)
    return found


def steps_of(minis: Sequence[Batch]) -> list[int]:
    """Returns the step that sampled each mini-batch, with the weights after the step before."""
    return [int(mini.policy_version[0]) + 1 for mini in minis]


@pytest.mark.parametrize("mode", [BYPASS, DECOUPLED, OWN_FORWARDS])
def test_which_batches_a_step_trains_on(
    train: Train, tmp_path: Path, overrides: list[str], minis: list[Batch], mode: Sequence[str]
) -> None:
    settings = (
        *mode,
        "rollout.reuse=2",
        "trainer.total_training_steps=4",
        "actor.optim.lr_scheduler=linear",
    )
    assert train(*settings) == 0
    order = [[1], [2, 1], [3, 2, 1], [4, 3, 2]]
    assert steps_of(minis) == [step for steps in order for step in steps for _ in range(2)]
    config = to_config(compose_config([*overrides, *settings]))
    assert config.total_updates() == len(minis) == 18
    rows = read_rows(tmp_path / "run")
    assert [row.get("reuse/age_mean") for row in rows[1:]] == [None, 1, 1.5, 1.5]
    assert [row.get("reuse/age_max") for row in rows[1:]] == [None, 1, 2, 2]
    # The largest rate of a step is that of its first update; the last update of all has 1/18 of it.
    firsts = [row["actor/lr"] for row in rows[1:]]
    assert firsts == pytest.approx([1e-3 * (18 - before) / 18 for before in (0, 2, 6, 12)])
    assert rows[-1]["reuse/lr"] == pytest.approx(1e-3 * 4 / 18)

    new: dict[int, Batch] = {}
    masks = []
    for mini in minis:
        first = new.setdefault(int(mini.seed[0]), mini)
        assert torch.equal(mini.seed, first.seed)
        assert torch.equal(mini.advantages, first.advantages)
        assert torch.equal(mini.rejection_mask, first.rejection_mask)
        assert torch.equal(mini.rollout_log_probs, first.rollout_log_probs)
        again = mini is not first
        same = torch.equal(mini.old_log_probs, first.old_log_probs)
        assert same == (mode is BYPASS or not again)
        masks.append(mini.rejection_mask)
    kept = torch.cat(masks).double().mean()
    assert 0 < kept < 1


@pytest.mark.parametrize("mode", [CENTERED, DECOUPLED, OWN_FORWARDS])
def test_what_is_measured_on_new_samples_does_not_change(
    train: Train, tmp_path: Path, mode: Sequence[str]
) -> None:
    """Up to the new samples of step 2, a run with reuse does what one without does."""
    settings = (*mode, "trainer.total_training_steps=2", "actor.optim.lr_scheduler=constant")
    rows = []
    for reuse in (0, 1):
        folder = tmp_path / str(reuse)
        assert train(*settings, f"rollout.reuse={reuse}", f"trainer.output_dir={folder}") == 0
        rows.append(without_timings(read_rows(folder)))
    for old, new in zip(*rows, strict=True):
        reused = {name for name in new if name.startswith("reuse/")}
        assert bool(reused) == (new["step"] == 2)
        measured = {name: value for name, value in old.items() if not name.startswith("val/")}
        assert measured.keys() == new.keys() - reused - {n for n in new if n.startswith("val/")}
        assert {n: new[n] for n in measured} == pytest.approx(measured, rel=1e-9, abs=1e-13)
    for name in ("histograms.jsonl", "rejected"):
        texts = [
            [
                path.read_text()
                for path in sorted((tmp_path / str(reuse)).rglob("*.json*"))
                if name in str(path)
            ]
            for reuse in (0, 1)
        ]
        assert texts[0] == texts[1] != []


@pytest.mark.parametrize(
    "mode",
    [
        (*CENTERED, "actor.ppo_epochs=2", "rollout.algo.sde_type=cps"),
        (*DECOUPLED, "rollout.algo.sde_type=dance_sde"),
        (*OWN_FORWARDS, "actor.diffusion_loss.loss_mode=flow_dppo", "rollout.staleness=1"),
    ],
    ids=["centered_cps", "decoupled_dance", "own_dppo_staleness"],
)
def test_an_interrupted_run_ends_bit_equal(
    train: Train, tmp_path: Path, mode: Sequence[str]
) -> None:
    settings = (*mode, "rollout.reuse=2", "trainer.total_training_steps=3", "trainer.test_freq=1")
    assert train(*settings, f"trainer.output_dir={tmp_path / 'whole'}") == 0
    pieces = [*settings, f"trainer.output_dir={tmp_path / 'pieces'}", "trainer.max_time=0.001"]
    assert [train(*pieces) for _ in range(3)] == [75, 75, 0]
    assert state(tmp_path / "whole") == state(tmp_path / "pieces")


def state(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]], list[bytes]]:
    """Returns the newest checkpoint and the metrics of a run."""
    newest = load_checkpoint(list_checkpoints(folder / "checkpoints")[-1])
    prints = {stem: fingerprint(tensors) for stem, tensors in newest.tensors.items()}
    files = [path.read_bytes() for path in newest.files]
    assert files
    return prints, without_timings(read_rows(folder)), files


@pytest.mark.parametrize("mode", ["bypass_ppo_clip", "decoupled_token_is"])
def test_text_is_trained_on_again_and_resumes(
    tmp_path: Path, minis: list[Batch], mode: str
) -> None:
    settings = (f"{RC}={mode}", "rollout.reuse=1", "trainer.total_training_steps=3")
    assert train_text(tmp_path / "whole", *settings) == 0
    assert steps_of(minis) == [1, 1, 2, 2, 1, 1, 3, 3, 2, 2]
    pieces = (*settings, "trainer.max_time=0.001")
    assert [train_text(tmp_path / "pieces", *pieces) for _ in range(3)] == [75, 75, 0]
    assert state(tmp_path / "whole") == state(tmp_path / "pieces")
