"""Runs that go on end with the same bits: fast rollouts, DiffusionNFT, editing, compiled blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.marks import slow_but
from support.runs import NFT, Train, Trained, final_state, read_rows, stopped_and_whole

from flowgrpo_rc import assets
from flowgrpo_rc.cli import main
from flowgrpo_rc.correction import auto_bands
from flowgrpo_rc.rollout.options import compiled
from flowgrpo_rc.spec.check_engine import missing_for_compiling

RC = "algorithm.rollout_correction"
# Rollouts of fewer evaluations, from shared noise, with a merged LoRA.
FAST = (
    "rollout.dtype=auto",
    "rollout.merge_lora=true",
    "rollout.algo.sde_window_range=[0,2]",
    "rollout.algo.tail=ab2",
    "rollout.algo.tail_steps=1",
    "rollout.algo.shared_prefix=true",
)
BYPASS = (
    f"{RC}.bypass_mode=true",
    f"{RC}.rollout_rs=token_k1",
    f"{RC}.rollout_rs_threshold=auto:4",
)
CACHED = (
    f"model.path={assets.path('tiny_glyph_sd3')}",
    "rollout.cache.every=2",
    "rollout.cache.window=true",
)
CASES = {
    "redrawn": (*BYPASS, *CACHED, "rollout.n=4", "actor.train_n=2", "rollout.redraw=true"),
    "bypass_sliding": (
        *BYPASS,
        "rollout.algo.sde_type=dance_sde",
        "rollout.merge_lora=false",
        "rollout.algo.sde_window_range=[0,4]",
        "rollout.algo.sde_window_interval=1",
        "actor.diffusion_loss.dual_clip=4",
    ),
    "rounded": (*BYPASS, "model.dtype=bf16", "rollout.merge_lora=rounded"),
    "decoupled": (f"{RC}.bypass_mode=false", "rollout.algo.sde_type=cps", f"{RC}.rollout_is=token"),
}


@pytest.mark.parametrize("name", slow_but(["redrawn"], CASES))
def test_fast_rollouts(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(auto_bands, "WARM_UP", 2)
    run = stopped_and_whole(train, tmp_path, *FAST, *CASES[name])
    last = read_rows(run)[-1]
    assert last["reward/failed_fraction"] == 0
    if name != "decoupled":
        assert last["actor/rollout_corr/rollout_rs_token_k1_auto_spread"] > 0


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_compiling(torch.device("cpu"))), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it loads inductor
def test_compiled_rollouts(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    monkeypatch.setattr(compiled, "_failed", failed)
    few = ("trainer.val_before_train=false", "trainer.test_freq=-1", "rollout.dtype=bf16")
    stopped_and_whole(train, tmp_path, *BYPASS, *few, "rollout.compile=true")
    assert not failed


@pytest.mark.slow
def test_diffusion_nft_with_its_report_card_and_evaluation(
    trained: Trained, train: Train, tmp_path: Path
) -> None:
    """The KL is to the LoRA that the run starts from, which a resumed run reads again."""
    start = (f"model.lora_path={trained() / 'lora'}", "actor.kl_reference=start")
    further = ("rollout.algo.tail=ab2", "actor.use_kl_loss=true")
    run = stopped_and_whole(train, tmp_path, *NFT, *start, *further)
    tensors, _, rows = final_state(run)
    assert tensors.keys() == {"lora", "ema", "optimizer", "old_policy", "old_policy_counts"}
    assert tensors["old_policy"] != tensors["lora"]
    last = rows[-1]
    assert last["actor/old_decay"] == pytest.approx(0.4)  # after 4 updates
    assert last["actor/old_deviation"] > 0
    assert last["actor/kl_loss"] > 0
    assert not any("logprob" in name or "clip" in name for name in last)
    assert (run / "report.html").stat().st_size > 10_000
    card = (run / "lora" / "README.md").read_text()
    assert "diffusion_nft, " in card
    assert "the ODE, 4 steps" in card
    assert main(["eval", str(run), "rollout.val_kwargs.n=2"]) == 0


EDITING = (
    "--config-name",
    "tiny_edit",
    "trainer.num_processes=1",
    "data.train_batch_size=2",
    "rollout.n=2",
    "rollout.micro_batch_size_per_gpu=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.diffusion_loss.clip_ratio=1e-3",  # an auto clip follows new samples alone
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.total_training_steps=2",
    "trainer.logger=[]",
    "model.decode_batch_size=2",
    "rollout.merge_lora=rounded",
    "reward.terms.ocr={engine: onnxruntime}",
)


@pytest.mark.slow
def test_editing_also_on_saved_samples(tmp_path: Path) -> None:
    def train(*further: str) -> int:
        return main(["train", *EDITING, *further])

    saved = stopped_and_whole(train, tmp_path, "trainer.save_rollouts=true")
    replayed = tmp_path / "replayed"
    assert train(f"data.replay_dir={saved}", f"trainer.output_dir={replayed}") == 0
    assert final_state(replayed)[0] == final_state(saved)[0]
    assert all(row["actor/grad_norm"] > 0 for row in read_rows(saved))
    assert all(row["reward/ocr"] > 0 for row in read_rows(saved))
