"""Training on some samples of each prompt (`actor.train_n`): which, with what, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compositions import checked_config
from support.runs import NFT, Train, final_state, read_rows
from torch import Tensor

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Batch, Rewards
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.records.rollout_files import load_rollout
from flowgrpo_rc.training.advantages import AdvantageEstimator
from flowgrpo_rc.training.sources.engine import EngineSource
from flowgrpo_rc.training.sources.source import Collected
from flowgrpo_rc.training.update import PolicyUpdate

RC = "algorithm.rollout_correction"
SOME = ("rollout.n=6", "actor.train_n=2", "actor.ppo_micro_batch_size_per_gpu=2")
BYPASS = (f"{RC}.bypass_mode=true", f"{RC}.rollout_rs=token_k1", "rollout.dtype=bf16")
DECOUPLED = (f"{RC}.bypass_mode=false", f"{RC}.rollout_is=token", "rollout.dtype=bf16")
MODES = {"decoupled": DECOUPLED, "nft": NFT}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Batch], list[tuple[Any, Batch]]]:
    """The batches that updates are given, and the advantages and batches that they come from."""
    given: list[Batch] = []
    whole: list[tuple[Any, Batch]] = []
    run, chosen = PolicyUpdate.run, AdvantageEstimator.chosen

    def noted_run(self: PolicyUpdate, batch: Batch, *rest: Any) -> Any:
        given.append(batch)
        return run(self, batch, *rest)

    def noted_chosen(self: AdvantageEstimator, advantages: Any, batch: Batch, *rest: Any) -> Any:
        whole.append((advantages, batch))
        return chosen(self, advantages, batch, *rest)

    monkeypatch.setattr(PolicyUpdate, "run", noted_run)
    monkeypatch.setattr(AdvantageEstimator, "chosen", noted_chosen)
    return given, whole


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_those_with_the_largest_advantages_are_trained_on(
    train: Train, tmp_path: Path, overrides: list[str], seen: Any, name: str
) -> None:
    settings = (*SOME, *MODES[name], "trainer.total_training_steps=2")
    assert train(*settings) == 0
    given, whole = seen
    rows = read_rows(tmp_path / "run")[1:]
    assert len(given) == len(whole) == len(rows) == 2
    prompts = checked_config(compose_config([*overrides, *settings])).data.train_batch_size
    for trained, (advantages, batch), row in zip(given, whole, rows, strict=True):
        assert len(batch) == 6 * prompts
        assert trained.group.tolist() == batch.group.view(-1, 6)[:, :2].flatten().tolist()
        advantages = advantages.cpu()
        best = advantages.view(-1, 6).abs().sort(descending=True).values[:, :2]
        found = dict(zip(batch.seed.tolist(), advantages.tolist(), strict=True))
        kept = torch.tensor([found[seed] for seed in trained.seed.tolist()])
        assert torch.equal(kept.view(-1, 2).abs().sort(descending=True).values, best.float())
        if trained.advantages.shape[1]:
            assert torch.equal(trained.advantages[:, 0].cpu(), kept)
        part = float((kept.double() ** 2).sum() / (advantages**2).sum())
        assert row["advantages/trained_fraction"] == pytest.approx(part, rel=1e-6)
        speed = len(batch) / row["timing_s/step"]
        assert row["perf/samples_per_second"] == pytest.approx(speed, rel=1e-6)


@pytest.mark.slow
def test_a_saved_rollout_holds_all_samples_and_replays(train: Train, tmp_path: Path) -> None:
    rounded = ("model.dtype=bf16", "rollout.merge_lora=rounded")
    settings = (*SOME, *BYPASS, *rounded, "trainer.total_training_steps=1")
    live, replayed = (f"trainer.output_dir={tmp_path / name}" for name in ("live", "replayed"))
    assert train(*settings, live, "trainer.save_rollouts=true") == 0
    rows = read_rows(tmp_path / "live")
    (file,) = (tmp_path / "live" / "rollouts").iterdir()
    assert len(load_rollout(file, torch.device("cpu"))[0]) % 6 == 0
    assert train(*settings, replayed, f"data.replay_dir={tmp_path / 'live' / 'rollouts'}") == 0
    again = read_rows(tmp_path / "replayed")
    for name in ("advantages/trained_fraction", "actor/pg_loss", "actor/grad_norm"):
        assert again[1][name] == rows[1][name]
    assert final_state(tmp_path / "replayed")[0] == final_state(tmp_path / "live")[0]


def test_text_is_trained_on_the_same_way(train_text: Train, seen: Any) -> None:
    few = ("actor.train_n=1", "actor.ppo_micro_batch_size_per_gpu=2")
    assert train_text(*few, "trainer.total_training_steps=1") == 0
    given, whole = seen
    assert (len(given[0]), len(whole[0][1])) == (4, 16)


REDRAWN = (
    *SOME,
    f"model.path={assets.path('tiny_glyph_sd3')}",
    "rollout.cache.every=2",
    "rollout.cache.window=true",
    "rollout.redraw=true",
)


@pytest.mark.slow
def test_chosen_samples_are_drawn_again_as_the_trainer_does(
    train: Train, tmp_path: Path, seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of an exact rollout with the same seeds, in the pool's group, scored anew."""
    noted: list[tuple[Tensor, Rewards]] = []
    receive = EngineSource._receive

    def noting(self: EngineSource, *given: Any) -> Collected:
        found = receive(self, *given)
        rewards = found.rewards()
        noted.append((found.batch.seed, rewards))
        return found._replace(rewards=lambda: rewards)

    monkeypatch.setattr(EngineSource, "_receive", noting)
    common = ("rollout.algo.shared_prefix=true", "trainer.total_training_steps=1")
    assert train(*REDRAWN, *BYPASS, "rollout.dtype=fp32", *common) == 0
    row = read_rows(tmp_path / "run")[1]
    (trained,), ((advantages, _),) = seen
    (pool, first), (again, second) = noted
    place = [pool.tolist().index(seed) for seed in again.tolist()]
    assert [one // 6 for one in place] == [one // 2 for one in range(len(again))]
    combined = first.total.cpu().clone()
    combined[place] = second.total.cpu()
    groups = combined.view(-1, 6)
    # FlowGRPO divides by the deviation of the batch.
    spread = (combined - combined.mean()).square().mean().sqrt() + 1e-4
    wanted = ((groups - groups.mean(1, keepdim=True)) / spread).flatten()[place]
    torch.testing.assert_close(advantages.cpu(), wanted, rtol=1e-6, atol=1e-9)
    assert not torch.equal(second.total.cpu(), first.total.cpu()[place])
    assert row["actor/rollout_corr/logprob_abs_diff_mean"] == pytest.approx(0, abs=1e-7)
    assert row["scouts/reward"] == pytest.approx(first.total.mean().item())
    difference = (second.total - first.total[place]).abs().mean().item()
    assert row["scouts/reward_difference"] == pytest.approx(difference)
    del noted[:], seen[0][:]
    exact = [word for word in REDRAWN if not word.startswith(("rollout.cache", "rollout.redraw"))]
    whole = (*exact, *BYPASS, "rollout.dtype=fp32", "actor.train_n=null", *common)
    assert train(*whole, f"trainer.output_dir={tmp_path / 'exact'}") == 0
    order = {seed: row for row, seed in enumerate(seen[0][0].seed.tolist())}
    rows = torch.tensor([order[seed] for seed in trained.seed.tolist()])
    torch.testing.assert_close(trained.all_latents, seen[0][0].all_latents[rows], rtol=0, atol=1e-5)
