"""Training of a model whose transformers share the schedule: both LoRAs, one alone, processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compositions import checked_config, resolved
from support.documented import ROOT
from support.launching import launch
from support.runs import NFT, VIDEO, Train, read_rows

from flowgrpo_rc.cli import main
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.models.base import load_model
from flowgrpo_rc.records.checkpoint import load_checkpoint
from flowgrpo_rc.spec.checks import check_networks

NAME = "WanPipeline+transformer_2"
# The four steps stand at 1000, 857, 602 and 9, two on each side of the boundary at 800.
SMALL = (
    "rollout.pipeline.num_frames=5",
    "rollout.pipeline.num_inference_steps=4",
    "rollout.pipeline.guidance_scale=2",
    "rollout.pipeline.guidance_scale_2=3",
    "rollout.algo.sde_window_size=1",
    "rollout.algo.sde_window_range=[0,3]",
    "rollout.n=2",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.optim.lr_scheduler=constant",
    "trainer.total_training_steps=1",
    "reward.terms.ocr=null",
    *VIDEO,
)

BOTH = ("rollout.algo.sde_window_size=2", "rollout.algo.sde_window_range=[1,3]")


def effect(run: Path) -> list[float]:
    """Returns the largest number of the B of each exported LoRA, which is 0 without training."""
    name = "pytorch_lora_weights.safetensors"
    files = (run / "lora" / name, run / "lora" / "transformer_2" / name)
    return [
        max(float(tensor.abs().max()) for key, tensor in load_file(file).items() if "lora_B" in key)
        for file in files
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "untrained"),
    [("[0,2]", "transformer_2"), ("[1,3]", None)],
)
def test_a_lora_whose_steps_are_never_trained_stays_without_effect_and_is_named(
    saved: Callable[[str], Path],
    train: Train,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    bounds: str,
    untrained: str | None,
) -> None:
    window = (f"rollout.algo.sde_window_range={bounds}", "rollout.algo.sde_window_size=null")
    steps = "trainer.total_training_steps=2"
    assert train(f"model.path={saved(NAME)}", *SMALL, *window, steps) == 0
    trained = [size > 0 for size in effect(tmp_path / "run")]
    assert trained == [untrained != "transformer", untrained != "transformer_2"]
    warned = [text for text in caplog.messages if "stays without effect" in text]
    assert len(warned) == (untrained is not None)
    assert all(f"the LoRA of {untrained} gets no gradient" in text for text in warned)
    card = (tmp_path / "run" / "lora" / "README.md").read_text()
    assert 'subfolder="transformer_2", load_into_transformer_2=True)' in card
    assert "guidance_scale_2=3.0," in card


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        (("rollout.algo.window_sharing=group",), True),
        (("rollout.algo.window_sharing=batch",), False),
        (("rollout.algo.sde_window_range=[0,2]",), False),
        (NFT, True),
    ],
)
def test_shards_need_processes_that_run_the_same_transformer(
    saved: Callable[[str], Path], given: tuple[str, ...], is_refused: bool
) -> None:
    config = checked_config(compose_config([f"model.path={saved(NAME)}", *SMALL, *given]))
    model = load_model(config.model, torch.device("cpu"))
    config.trainer.strategy = "ddp"
    check_networks(resolved(config, 2), model)
    config.trainer.strategy = "fsdp2"
    message = "trainer.strategy=fsdp2 shares the frozen weights of transformer and"
    with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
        check_networks(resolved(config, 2), model)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("strategy", "window"),
    [
        ("ddp", ("rollout.algo.window_sharing=sample", "rollout.algo.shared_prefix=false")),
        ("fsdp2", (*BOTH, "actor.steps_per_forward=null")),
    ],
)
def test_two_processes_train_what_one_does(
    saved: Callable[[str], Path],
    overrides: list[str],
    tmp_path: Path,
    strategy: str,
    window: tuple[str, ...],
) -> None:
    """Forwards have rows of both transformers.

    With a window for each sample, processes run different transformers at the same time. Some
    layers of Wan stay in fp32, and round otherwise in batches of other sizes.
    """
    settings = [
        *overrides,
        f"model.path={saved(NAME)}",
        *SMALL,
        *window,
        "model.dtype=fp64",
        "rollout.dtype=fp64",
        "rollout.val_kwargs.n=2",
        "actor.use_kl_loss=true",
        "actor.ema.enable=false",
        f"trainer.strategy={strategy}",
    ]
    runs = [tmp_path / "one", tmp_path / "two"]
    assert main(["train", *settings, f"trainer.output_dir={runs[0]}"]) == 0
    words = ("-m", "flowgrpo_rc.train", *settings, f"trainer.output_dir={runs[1]}")
    launch(2, *words, python_path=ROOT / "tests")
    ours, theirs = (
        load_checkpoint(run / "checkpoints" / "step_1").tensors["optimizer"] for run in runs
    )
    assert ours.keys() == theirs.keys()
    # Not the weights: Adam's first step divides a gradient by its own size, so the rounding of the
    # smallest gradients would count as much as the largest ones. `exp_avg` is the gradient.
    for name in (name for name in ours if name.endswith(".exp_avg")):
        tolerance = 5e-3 * float(ours[name].abs().max())
        torch.testing.assert_close(theirs[name], ours[name], atol=tolerance, rtol=0)
    assert all(size > 1e-5 for size in effect(runs[1]))
    norms = [[row.get("actor/grad_norm", 0.0) for row in read_rows(run)] for run in runs]
    assert max(norms[0]) > 0
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)
