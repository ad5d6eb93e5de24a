"""`flowgrpo-rc plan`: full architectures without weights, and what a run on them would need."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.plans import ARCHITECTURES, QWEN, SD35, job

from flowgrpo_rc.cli import main
from flowgrpo_rc.models.architecture import build_architecture, unpack_architecture
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.quantization import quantized_layers
from flowgrpo_rc.planning.fit import Fitter, Line
from flowgrpo_rc.planning.plan import make_plan
from flowgrpo_rc.planning.weights import Job, as_size, memory, on_the_host
from flowgrpo_rc.planning.work import counts
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine

T5_XXL, UMT5_XXL = 4_762_310_656, 5_680_910_336
SD_VAE, WAN_VAE = 83_819_683, 126_892_531
QWEN_IMAGE = (20_430_401_088, 8_292_166_656, WAN_VAE)
Z_IMAGE = (6_154_908_736, 4_022_468_096, SD_VAE)
# Published numbers of parameters: transformers, text encoders, VAE.
PUBLISHED = {
    "stable-diffusion-3.5-medium": (2_243_171_520, 123_650_304, 694_659_840, T5_XXL, SD_VAE),
    "FLUX.1-dev": (11_901_408_320, 123_060_480, T5_XXL, SD_VAE),
    "Qwen-Image": QWEN_IMAGE,
    "Qwen-Image-Edit-2511": QWEN_IMAGE,
    # Of the transformer "4B" is published, and of the text encoder, Qwen3-4B, this number.
    "FLUX.2-klein-4B": (3_875_544_576, 4_022_468_096, 84_046_115),
    "Sana_600M_512px_diffusers": (591_747_872, 2_614_341_888, 312_250_275),
    "Z-Image": Z_IMAGE,
    "Z-Image-Turbo": Z_IMAGE,
    "Wan2.1-T2V-1.3B-Diffusers": (1_418_996_800, UMT5_XXL, WAN_VAE),
    # Of each transformer "14B" is published.
    "Wan2.2-T2V-A14B-Diffusers": (14_288_491_584, 14_288_491_584, UMT5_XXL, WAN_VAE),
}


def sizes(run: Job) -> dict[str, int]:
    return {name: size for name, size, _ in memory(run)}


def values(run: Job) -> dict[str, str]:
    return {name: value for name, value, _ in counts(run)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones_and_nothing_is_allocated(name: str) -> None:
    folder = unpack_architecture(ARCHITECTURES / f"{name}.json")
    model = build_architecture(ModelConfig(path=str(folder), dtype="bf16"))
    components = model.pipeline.components.values()
    parts = [part for part in components if isinstance(part, torch.nn.Module)]
    found = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert sorted(found) == sorted(PUBLISHED[name])
    assert all(p.is_meta for part in parts for p in part.parameters())
    assert {p.dtype for p in model.transformer.parameters()} == {torch.bfloat16}
    whole = ("stable-diffusion", "Sana", "Wan")  # their VAE stays fp32
    expected = torch.float32 if name.startswith(whole) else torch.bfloat16
    assert {p.dtype for p in model.pipeline.vae.parameters()} == {expected}


def test_every_architecture_is_listed() -> None:
    listed = (ARCHITECTURES / "README.md").read_text()
    files = {path.stem: path for path in ARCHITECTURES.glob("*.json")}
    assert files.keys() == PUBLISHED.keys()
    for file in files.values():
        assert json.loads(file.read_text())["model_index.json"]["_name_or_path"] in listed
    for counts_of_parts in PUBLISHED.values():
        assert all(f"{count:,}" in listed for count in counts_of_parts)


def test_the_reference_recipe_by_hand() -> None:
    plan = job("+experiment=sd35_medium_ocr_8xh100", processes=8)
    # LoRA of rank 32 on 8 layers of 1536 x 1536 in 24 blocks; the last has no to_add_out.
    trained = (24 * 8 - 1) * 32 * (1536 + 1536)
    assert plan.trained == trained
    position = 384 * 384 * 1536  # a buffer
    assert sizes(plan) == {
        "transformer": 2 * (2_243_171_520 + position),
        "text encoders, VAE": sizes(plan)["text encoders, VAE"],
        "LoRA": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "average": 4 * trained,
        "rollout copy": 4 * trained,
        "batch": 4 * 144 * 10 * 16 * 64 * 64,
    }
    encoders = 2 * (123_650_304 + 694_659_840 + T5_XXL) + 4 * SD_VAE
    # The encoders also have small buffers.
    assert sizes(plan)["text encoders, VAE"] == pytest.approx(encoders, rel=1e-3)
    assert values(plan) == {
        "images per step": "1,152",
        "groups per step": "48",
        "stochastic steps": "9",
        "latents of a sample": "65,536",
        "forwards, held-out sample": "80",
        "forwards, sampling": "2,880",
        "forwards, reference": "2,592",
        "forwards with backward": "2,592",
        "decoded by the VAE": "144",
        "encoded prompts": "7",
        "mini-batches per step": "2",
        "micro-batches each": "72",
        "rows of a micro-batch": "18",
        "steps": "1,000",
        "updates": "2,000",
    }


def test_two_transformers_count_twice() -> None:
    recipe = "+experiment=wan22_t2v_a14b_ocr_8xh200"
    plan = job(recipe, processes=8)
    # LoRA of rank 32 on 8 layers of 5120 x 5120 in 40 blocks, twice.
    trained = 2 * 40 * 8 * 32 * (5120 + 5120)
    parameters = make_plan(plan, measure=False).parameters
    assert parameters[-1] == ("LoRA", trained, "trained: 0.73% of the transformers")
    whole = sizes(plan)
    assert whole["transformers"] == pytest.approx(2 * 2 * 14_288_491_584, rel=1e-3)
    assert whole["text encoders, VAE"] == pytest.approx(2 * UMT5_XXL + 4 * WAN_VAE, rel=1e-3)
    assert (whole["gradients"], whole["rollout copy"]) == (4 * trained, 4 * trained)
    split = job(recipe, "trainer.strategy=fsdp2", "rollout.dtype=fp32", processes=8)
    assert sizes(split)["transformers"] == whole["transformers"] // 8
    assert sizes(split)["rollout copy"] == 2 * whole["transformers"] + 4 * trained
    small = job(recipe, "rollout.quantization=int8", processes=8)
    assert sizes(small)["rollout copy"] < 0.6 * whole["transformers"]


def test_sharding() -> None:
    """Frozen weights are split over the ranks of a node, and over no more."""
    recipe = "+experiment=sd35_medium_ocr_8xh100"
    whole = sizes(job(recipe, processes=8))["transformer"]
    for nodes in (1, 2):
        sharded = job(recipe, "trainer.strategy=fsdp2", processes=8, nodes=nodes)
        assert sizes(sharded)["transformer"] == whole // (8 // nodes)


def test_a_separate_engine() -> None:
    """Qwen-Image: frozen weights over four ranks, and a whole pipeline in the engine."""
    sharded = job(QWEN, processes=4)
    assert sizes(sharded)["transformer"] == 2 * QWEN_IMAGE[0] // 4
    assert sizes(sharded)["rollout engine"] == 0  # it sleeps, but for the rollout
    awake = job(QWEN, "rollout.engine_kwargs.sleep=false", processes=4)
    assert sizes(awake)["rollout engine"] == pytest.approx(2 * sum(QWEN_IMAGE), rel=1e-3)
    assert "average" not in sizes(sharded)
    assert "forwards, old policy" not in values(sharded)  # bypass mode
    assert values(sharded)["forwards, sampling"] == f"{128 * 10 * 2:,}"


class OwnEngine(DiffusersEngine):
    """An engine out of the tree that samples with a copy of the trainer's network."""


def test_an_engine_says_whether_it_copies_the_network() -> None:
    own = job(SD35, f"rollout.name={__name__}.OwnEngine")
    assert sizes(own) == sizes(job(SD35))
    assert "rollout copy" in sizes(own)
    assert "rollout engine" in sizes(job(SD35, "rollout.name=vllm_omni"))


def test_copies_in_another_precision_and_decoupled_mode() -> None:
    base = job(SD35)
    decoupled = "algorithm.rollout_correction.bypass_mode=false"
    changed = job(SD35, "model.dtype=fp32", decoupled, "actor.ppo_epochs=2")
    trained = sizes(base)["LoRA"] // 4
    assert sizes(changed)["transformer"] == 2 * sizes(base)["transformer"]
    assert sizes(changed)["rollout copy"] == sizes(base)["transformer"] + 2 * trained
    assert values(base)["forwards with backward"] == f"{64 * 9 * 2:,}"
    # Only the second of two mini-batches is recomputed.
    assert values(changed)["forwards, old policy"] == f"{64 * 9:,}"
    assert values(changed)["forwards with backward"] == f"{64 * 9 * 2 * 2:,}"
    assert values(changed)["updates"] == "4,000"


def test_training_on_some_of_the_samples() -> None:
    """All are sampled. A recompute before the rewards are known is of all of them."""
    chosen_ones = ("actor.train_n=2", "actor.ppo_micro_batch_size_per_gpu=4")
    recipe = (SD35, *chosen_ones, "algorithm.rollout_correction.bypass_mode=false")
    found = values(job(*recipe))
    sampling = "forwards, sampling"
    assert found[sampling] == values(job(SD35))[sampling]
    chosen = 64 * 9 * 2 // 4
    assert found["forwards with backward"] == f"{chosen:,}"
    assert found["forwards, old policy"] == f"{chosen // 2:,}"
    cheap = ("rollout.quantization=int8", "rollout.redraw=true")
    keep = "algorithm.rollout_correction.exclude_rejected=false"
    redrawn = values(job(*recipe, *cheap, keep))
    assert redrawn["forwards, redrawn"] == f"{64 // 4 * 10 * 2:,}"
    norm = ("rollout_is=token", "rollout_is_batch_normalize=true")
    every = job(*recipe, *(f"algorithm.rollout_correction.{setting}" for setting in norm))
    assert values(every)["forwards, old policy"] == f"{64 * 9 * 2:,}"


def test_why_decoupled_mode_recomputes_everything() -> None:
    rows = counts(job(SD35, "algorithm.rollout_correction=decoupled_seq_is"))
    ((count, why),) = [row[1:] for row in rows if row[0] == "forwards, old policy"]
    assert count == f"{64 * 9 * 2:,}"
    assert "need all steps" in why


def test_settings_that_save_memory() -> None:
    base = sizes(job(SD35))
    smaller = ("actor.optim.name=adamw_8bit", "rollout.quantization=int4")
    less = sizes(job(SD35, "model.offload_idle=true", *smaller))
    assert less["text encoders, VAE"] == 0
    assert less["optimizer"] == base["optimizer"] // 4
    # Per block: 8 projections of attention, the same of the second attention in the first 13, two
    # feed-forwards, two modulations; the last block has one modulation of its context that is
    # smaller, and neither its output nor its feed-forward.
    width, blocks, dual = 1536, 24, 13
    joint = 8 + 2 * 8 + 2 * 6
    linear = width**2 * (blocks * joint + dual * (4 + 3) - (1 + 8 + 4))
    # int4 pads rows of 1536 to 2048; those of the second half of a feed-forward have 6144.
    wide = width**2 * (blocks * 2 * 4 - 4)
    packed = (linear - wide) * 2048 // 1536 + wide
    bits = packed // 2 + packed // 32 * 4
    assert 8 * bits / linear == pytest.approx(6.4, abs=0.1)
    assert less["rollout copy"] == base["transformer"] - 2 * linear + bits + base["LoRA"] // 2
    assert sizes(job(SD35, "rollout.staleness=2"))["older LoRAs"] == 2 * base["LoRA"]
    merged = sizes(job(SD35, "rollout.merge_lora=true"))["rollout copy"]
    assert merged == base["rollout copy"] + 2 * (24 * 8 - 1) * width**2
    assert (
        2 * sizes(job(SD35, "rollout.merge_lora=rounded"))["rollout copy"] == base["rollout copy"]
    )
    away = job(SD35, "rollout.workers=4")
    assert sizes(away)["rollout copy"] == 0
    frozen = base["transformer"] + base["text encoders, VAE"]
    worker = frozen + base["LoRA"] + base["rollout copy"]
    assert f"each with a whole model: {worker / 2**30:.2f} GiB" in str(memory(away))


def test_quantized_training_weights() -> None:
    nf4, own, base = "model.quantization=nf4", "rollout.name=vllm_omni", job(SD35)
    packed, whole = job(SD35, nf4), sizes(base)
    layers = quantized_layers(base.model.network)
    weights = sum(layer.weight.numel() for layer in layers)
    added = 2 * weights // 64 + 4 * 512 * len(layers)  # scales, and the levels of each byte
    less = 2 * weights - weights // 2 - added
    assert packed.saved == less
    assert sizes(packed)["transformer"] == whole["transformer"] - less < whole["transformer"] / 2
    assert sizes(packed)["rollout copy"] == whole["rollout copy"]
    # A copy in another precision has the same codes.
    floats = whole["transformer"] - 2 * weights + added
    in_fp32 = sizes(job(SD35, nf4, "rollout.dtype=fp32"))["rollout copy"]
    assert in_fp32 == 2 * floats + whole["LoRA"]
    # Parameters, loading and an engine with a pipeline of its own are as before.
    plans = [make_plan(run, measure=False) for run in (packed, base)]
    assert plans[0].parameters == plans[1].parameters
    assert on_the_host(packed)[-1] == on_the_host(base)[-1]
    assert job(SD35, own, nf4).engine == job(SD35, own).engine


def test_layers_on_the_host() -> None:
    """All weights of the blocks' linear layers but the largest, which may be on its way."""
    for own in ("model.dtype=bf16", "model.quantization=nf4"):
        runs = [job(SD35, own, f"model.offload_idle={idle}") for idle in ("true", "layers")]
        whole, less = (sizes(run)["transformer"] for run in runs)
        layers = quantized_layers(runs[1].model.network)
        away = [(m.codes if "nf4" in own else m.weight).nbytes for m in layers]
        assert whole - less == sum(away) - max(away) > whole / 2
        assert on_the_host(runs[1])[0][1] - on_the_host(runs[0])[0][1] == sum(away)
        found = Fitter(runs[0], needs={"rollout": Line(0, 0)}).candidates()
        ways = [spec.settings.model.offload_idle for spec in found]
        assert ways == sorted(ways, key=lambda way: way == "layers")  # the last resort
        assert "layers" in ways


def test_the_command(capsys: pytest.CaptureFixture) -> None:
    """The bundled job from its folder, and with the overrides of verl-omni."""
    overrides = ["trainer.nnodes=1", "actor_rollout_ref.rollout.n=24", "--processes", "2"]
    assert main(["plan", *overrides, "--tflops", "2"]) == 0
    shown = capsys.readouterr()
    assert "tiny_ocr: StableDiffusion3Pipeline on 2 processes, ddp" in shown.out
    for words in ("transformer", "2,293,024", "8 prompts x 24; 96 on a rank", "sum"):
        assert words in shown.out
    assert re.search(r"^  Loss and clip +flow_grpo, clip auto:16$", shown.out, re.MULTILINE)
    (peak,) = re.findall(r"^  peak +(\S+ \S+) ", shown.out, re.MULTILINE)
    assert peak.endswith("GiB")
    besides = ("CUDA and libraries", "NCCL", "gaps between tensors")
    for name in (*besides, "update", "rollout", "decoding", "while loading"):
        assert re.search(rf"^  {name} ", shown.out, re.MULTILINE), name
    assert "no counterpart" in shown.err
    assert "work of a rank in a step, at 2 TFLOP a second" in shown.out
    rows = re.findall(r"^  (\w.*?)  +([\d.]+) TFLOP +(\d+)% +(\S+) s  ", shown.out, re.MULTILINE)
    *shares, whole, _ = [(float(size), int(share), float(time)) for _, size, share, time in rows]
    assert [name for name, *_ in rows][-2:] == ["sum", "held-out sample"]
    assert sum(size for size, _, _ in shares) == pytest.approx(whole[0], rel=0.02)
    assert sum(share for _, share, _ in shares) == pytest.approx(100, abs=2)
    assert whole[2] == pytest.approx(whole[0] / 2, rel=0.02)  # two digits


def test_the_command_fits_a_card(capsys: pytest.CaptureFixture) -> None:
    """The peak, drawn from one and two samples, is that of a plan with the proposed settings."""
    assert main(["plan", "--fit", "8GB", "rollout.dtype=bf16"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("--fit 8: measures what one and two samples need")
    sentence, overrides = shown.out.splitlines()
    peak = as_size(make_plan(job("rollout.dtype=bf16", *overrides.split())).peak_bytes)
    assert sentence == f"tiny_ocr fits a card of 8 GiB with 5% to spare: peak {peak} with"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config-name", "token_grpo"], "model.kind=causal_lm"),
        (["--processes", "3"], "3 processes"),
        # They measure nothing before.
        (["--fit", "8", "--processes", "0"], "error: --processes 0: give at least 1\n"),
        *(
            (words, "--fit: no GPU is visible; give the GiB of a card")
            for words in (["--fit"], ["--fit", "--processes=1"], ["--fit", "trainer.seed=2"])
        ),
        (["--nodes", "0"], "--nodes 0: give at least 1"),
        (["--tflops", "0"], "--tflops 0.0: give the rate of a card, above 0, such as 400"),
        (["model.offload_idle=layers", "rollout.dtype=bf16"], "set rollout.name=diffusers,"),
        (["--fit", "-1"], "--fit -1: give the GiB of a card, above 0, such as 24 or 24GB"),
        (["--fit", "24TB"], "--fit 24TB: give the GiB of a card"),
        ([QWEN, "rollout.pipeline.true_cfg_scale=null"], "true_cfg_scale"),
    ],
)
def test_settings_that_a_run_would_refuse(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_component_whose_settings_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(unpack_architecture(ARCHITECTURES / "Qwen-Image.json"), folder)
    (folder / "vae" / "config.json").unlink()
    assert main(["plan", QWEN, f"model.path={folder}"]) == 2
    assert "the settings of its vae cannot be read" in capsys.readouterr().err
