"""`flowgrpo-rc calibrate`: what it measures, which faults it names, which settings it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.compositions import checked_config, resolved
from support.marks import slow, slow_but
from support.runs import read_rows
from support.torchao import needs_torchao

from flowgrpo_rc import assets
from flowgrpo_rc.assembly.processes import make_processes
from flowgrpo_rc.assembly.source import make_engine
from flowgrpo_rc.assembly.task import make_task
from flowgrpo_rc.calibration.faults import Lora
from flowgrpo_rc.calibration.measure import (
    MOVEMENT,
    other_precisions,
    plant_movements,
    same_as_trainer,
)
from flowgrpo_rc.calibration.record import check_engine, check_means, check_record
from flowgrpo_rc.calibration.verdict import Diagnosis
from flowgrpo_rc.cli import main
from flowgrpo_rc.commands.calibrate import (
    Rollouts,
    compare,
    sample_all,
)
from flowgrpo_rc.config.compose import compose_config
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.engine import ImageRequest, RolloutEngine
from flowgrpo_rc.spec.check_inputs import prompts_of

KEY = "algorithm.rollout_correction"
PLAIN = f"{KEY}.centered=false"
ENGINES = "support.faulty_engines"
CLIP = "actor.diffusion_loss.clip_ratio"
BYPASS = f"{KEY}.bypass_mode=true"
GUARD = "actor.diffusion_loss.loss_mode=grpo_guard"
# Engines: the precision, the cause, words of the verdict. Replay explains the first ones.
REPLAYED = {
    "Bf16Latents": ("fp32", "latents", "latents"),
    "Bf16Input": ("fp32", "latents", "latents"),
    "Bf16Steps": ("fp32", "latents", "latents"),
    "Bf16Timestep": ("bf16", "timestep", "timestep"),
    "Guidance": ("bf16", "guidance", "guidance"),
    "LateLogProbs": ("fp32", "window", "window"),
    "LateWindow": ("fp32", "window", "window"),
    "NoGuidance": ("fp32", "guidance", "guidance dropped: guidance_scale 1 in place of 4.5"),
    "NoLora": ("fp32", "lora", "lora"),
    "Shift": ("fp32", "schedule", "schedule"),
    "StaleWeights": ("bf16", "weights", "weights"),
    "UnboundLora": ("fp32", "lora", "the LoRA is bound to no module"),
    "WeakLora": ("fp32", "lora", "lora"),
}
NAMED = REPLAYED | {
    "Bf16Weights": ("fp32", "precision", "computed in bf16"),
    "HalfLora": ("fp32", "lora", "tensors are bound nowhere"),
    "NoNegative": ("fp32", "guidance", "no negative prompt is recorded"),
    # These make no mismatch.
    "SharedNoise": ("fp32", "noise", "samples share the noise of a step"),
    "NeighboursNoise": ("fp32", "noise", "samples share noise at different steps"),
    "SameNoise": ("fp32", "noise", "the steps of a sample share their noise"),
    "LoudNoise": ("fp32", "noise", "the variance of the noise is 1.2"),
    "UniformNoise": ("fp32", "noise", "the kurtosis of the noise is 1.8"),
    "NotTheSeeds": ("fp32", "noise", "do not have the noise of their sample's seed, which the eng"),
}
NO_FAULT = {
    "OneByOne": ("fp32", "no fault: the mismatch of"),
    "OtherKernels": ("bf16", "no fault: the mismatch of"),
    "OwnNoise": ("fp32", "the engine draws noise of its own, which is no fault"),
    "Autocast": ("fp32", "it is as large as that of bf16: see whether the engine computes"),
}
# Of a model whose tokenizer sees whitespace and whose schedule is shifted.
OF_QWEN = {
    "Collapsed": (
        "prompt",
        "prompts whitespace collapsed, which shows in a prompt with planted",
    ),
    "TellsCollapsed": ("prompt", "the engine recorded prompts whitespace collapsed"),
    "NoShift": ("schedule", "shift dropped: the schedule is that of shift 1"),
}


class Bench:
    """A random model with guidance, whose LoRA was moved. Engines are tried on it."""

    def __init__(self, *overrides: str, config_dir: str | None = None) -> None:
        plain = (PLAIN, "rollout.merge_lora=false")
        config = checked_config(compose_config([*plain, *overrides], config_dir=config_dir))
        self.run = resolved(config)
        self.task = make_task(self.run, make_processes(config))
        # The task's own policy holds accelerate's state, which is reset after each test.
        self.task.policy = FlowPolicy(self.task.model, self.task.model.network)
        self.prompts = prompts_of(self.run)[0].step(0)[:1]
        self.lora = Lora(*plant_movements(self.task.model.network, 0))

    def diagnose(self, *engine: str | None) -> Diagnosis:
        """Diagnoses an engine of a name, a precision and a quantization."""
        rollouts = self.sampled(*engine)  # which sets the engine of the run
        return compare(self.run, self.task, rollouts, self.lora)[-1]

    def engine(
        self, name: str, dtype: str, quantization: str | None = None
    ) -> RolloutEngine[ImageRequest]:
        named = name if name == "diffusers" or "." in name else f"{ENGINES}.{name}"
        rollout = self.run.settings.rollout
        changed = replace(rollout, name=named, dtype=dtype, quantization=quantization)
        self.run = self.run.with_sections(rollout=changed)
        return make_engine(self.run.engine_class, self.run.engine_options, self.task.model)

    def sampled(self, *engine: str | None) -> Rollouts:
        made = self.engine(*engine)
        return sample_all(self.run, self.task.model, made, self.lora, self.prompts)


@pytest.fixture(scope="module")
def bench(checkpoint: Path, prompt_file: Path) -> Bench:
    return small_bench(checkpoint, prompt_file)


def small_bench(model_path: Path, prompt_file: Path, *further: str) -> Bench:
    return Bench(
        f"model.path={model_path}",
        "model.lora_rank=4",
        "model.lora_alpha=8",
        f"data.train_files={prompt_file}",
        "rollout.n=2",
        "rollout.micro_batch_size_per_gpu=8",
        "rollout.pipeline.num_inference_steps=4",
        "rollout.pipeline.guidance_scale=4.5",
        "rollout.algo.sde_window_size=2",
        "rollout.algo.sde_window_range=[0,2]",
        "rollout.algo.shared_prefix=false",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "trainer.device=cpu",
        *further,
    )


@pytest.mark.parametrize("engine", slow_but(["Bf16Latents"], NAMED))
def test_a_fault_is_named(bench: Bench, engine: str) -> None:
    dtype, cause, words = NAMED[engine]
    found = bench.diagnose(engine, dtype)
    assert found.cause == cause, found
    assert words in found.sentence()
    assert found.doubt is not None
    if engine in REPLAYED:  # whatever the record admits
        assert found.explanation is not None
        assert found.explanation.residual <= found.as_recorded / 10
    if cause == "noise":
        assert (found.explanation, found.as_recorded) == (None, 0)
    # The engine shows half of a LoRA, and no replay does.
    assert ("no known fault explains" in found.sentence()) == (engine == "HalfLora")


@pytest.mark.parametrize("engine", slow_but(["OneByOne"], NO_FAULT))
def test_what_is_no_known_fault(bench: Bench, engine: str) -> None:
    dtype, words = NO_FAULT[engine]
    found = bench.diagnose(engine, dtype)
    assert found.cause is None, found
    assert words in found.sentence()
    assert ("no known fault explains" in found.sentence()) == (engine == "Autocast")
    assert (found.doubt is None) == (engine != "Autocast")
    assert (found.as_recorded > 0) == (engine != "OwnNoise")


@pytest.mark.parametrize("dtype", ["fp32", slow("bf16")])
def test_the_diffusers_engine_is_replayed_bit_for_bit(bench: Bench, dtype: str) -> None:
    found = bench.diagnose("diffusers", dtype)
    assert (found.cause, found.healthy, found.as_recorded) == (None, True, 0)
    assert found.mismatch == found.copy_mismatch
    assert list(found.notes) == []
    causes = ("schedule", "guidance", "lora", "weights")
    # What such a fault would amount to.
    assert min(trial.residual for trial in found.trials if trial.cause in causes) > 0


@pytest.mark.slow
def test_an_engine_that_merges_the_lora_is_replayed_by_a_copy_that_does(
    checkpoint: Path, prompt_file: Path
) -> None:
    merging = small_bench(checkpoint, prompt_file, "rollout.merge_lora=true")
    found = merging.diagnose("diffusers", "bf16")
    assert (found.cause, found.healthy, found.as_recorded) == (None, True, 0)
    assert found.mismatch == found.copy_mismatch > 0
    assert merging.diagnose("StaleWeights", "bf16").cause == "weights"


@pytest.mark.slow
def test_the_guidance_that_a_transformer_takes_as_an_input_is_tried_too(
    saved: Callable[[str], Path], prompt_file: Path
) -> None:
    found = small_bench(saved("FluxPipeline"), prompt_file).diagnose("Guidance", "fp32")
    assert found.explanation is not None, found
    assert found.explanation.fault == "guidance_scale 4.545 in place of 4.5"


@pytest.mark.parametrize(
    ("model", "rollout", "autocast", "others", "same"),
    [
        ("fp32", "bf16", "no", ["fp16"], "fp32"),
        ("bf16", "bf16", "no", ["fp16"], "bf16"),  # one in fp32 would be twice as large
        ("fp32", "bf16", "bf16", ["fp32", "fp16"], None),
        ("fp32", "fp32", "bf16", ["fp16", "bf16"], None),
    ],
)
def test_no_copy_is_larger_than_the_trainer(
    model: str, rollout: str, autocast: str, others: list[str], same: str | None
) -> None:
    """Only the precision whose copy would be the trainer's own network is left out."""
    given = [f"model.dtype={model}", f"rollout.dtype={rollout}"]
    config = checked_config(compose_config([*given, f"trainer.mixed_precision={autocast}"]))
    assert (other_precisions(config), same_as_trainer(config)) == (others, same)


RECORDS = {
    "settings": lambda batch: batch.replace(spec=replace(batch.spec, guidance_scale=4.6)),
    "schedule": lambda batch: batch.replace(sigmas=batch.sigmas * 1.001),
    "window": lambda batch: batch.replace(step_indices=batch.step_indices + 1),
    "timestep": lambda batch: batch.replace(all_timesteps=batch.all_timesteps.bfloat16().float()),
    "latents": lambda batch: batch.replace(all_latents=batch.all_latents.half().float()),
    "weights": lambda batch: batch.replace(policy_version=batch.policy_version - 1),
    "guidance": lambda batch: batch.replace(negative=None),
}


def test_a_record_that_admits_a_fault(bench: Bench) -> None:
    """It counts even if its log-probs agree with the fault."""
    model = bench.task.model
    rollout = bench.sampled("diffusers", "fp32").few
    assert [*check_record(rollout, model, version=2)] == []
    for cause, change in RECORDS.items():
        changed = replace(rollout, batch=change(rollout.batch))
        assert [found for found, _ in check_record(changed, model, version=2)] == [cause]


def test_means_that_are_not_those_of_the_log_probs(bench: Bench) -> None:
    batch = bench.sampled("diffusers", "bf16").many.batch
    means = batch.prev_sample_mean
    assert [*check_means(batch)] == []
    assert [*check_means(batch.replace(prev_sample_mean=None))] == []
    for wrong in (means.bfloat16().float(), means.roll(1, 0), 1.001 * means):
        ((cause, _),) = check_means(batch.replace(prev_sample_mean=wrong))
        assert cause == "means"


@pytest.mark.slow
def test_faults_of_prompts_and_of_a_shift_are_named(
    saved: Callable[[str], Path], prompt_file: Path
) -> None:
    """The prompts of the run have no whitespace that could be changed."""
    scale = "rollout.pipeline.true_cfg_scale=4.0"
    qwen = small_bench(saved("QwenImagePipeline"), prompt_file, scale)
    assert qwen.diagnose("diffusers", "bf16").cause is None
    for engine, (cause, words) in OF_QWEN.items():
        found = qwen.diagnose(engine, "fp32")
        assert found.cause == cause, (engine, found)
        assert words in found.sentence()


@pytest.mark.slow
@pytest.mark.kernels
@needs_torchao
def test_a_quantization_that_is_not_applied_is_named(prompt_file: Path) -> None:
    """The layers of the bundled model are wide enough for groups of 32."""
    wide = small_bench(assets.path("tiny_glyph_sd3"), prompt_file)
    clean = wide.diagnose("diffusers", "bf16", "int4")
    assert (clean.cause, clean.healthy) == (None, True)
    measured = wide.diagnose("HiddenPlainWeights", "fp32", "int4")
    assert measured.explanation is not None
    assert "quantization: int4 not applied: computed as the trainer does" in measured.sentence()


def test_an_engine_that_shows_other_weights_than_it_was_given(bench: Bench) -> None:
    engine = bench.engine("diffusers", "fp32")
    spec = bench.run.config.rollout.spec()
    engine.sync_weights(bench.lora.current, 1)
    assert [*check_engine(engine, bench.lora.current, spec)] == []
    ((cause, _),) = check_engine(engine, bench.lora.before, spec)
    assert cause == "weights"


def test_the_planted_movements_have_their_size(bench: Bench) -> None:
    """The two movements are measured by the product of the matrices."""
    network = bench.task.model.network
    states = bench.lora
    names = [name for name in states.current if ".lora_B." in name]
    assert not any(states.start[name].any() for name in names)
    for name in names[:3]:
        weight = network.get_submodule(name.split(".lora_B.")[0]).base_layer.weight
        down = states.start[name.replace("lora_B", "lora_A")]
        for before, after in ((states.start, states.before), (states.before, states.current)):
            product = 2 * (after[name] - before[name]) @ down
            assert product.norm() / weight.norm() == pytest.approx(MOVEMENT, rel=1e-4)


# --- The command


@pytest.fixture
def calibrate(overrides: list[str], tmp_path: Path) -> Callable[..., int]:
    def run(*further: str) -> int:
        out = ("--out", str(tmp_path / "out"), "--prompts", "1")
        return main(["calibrate", *out, *overrides, *further])

    return run


def test_the_folder_of_a_result(
    calibrate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert calibrate("--name", "fp32", "rollout.merge_lora=false") == 0
    shown = capsys.readouterr().out
    out = tmp_path / "out"
    written = json.loads((out / "calibration.json").read_text())
    told = (written["diagnosis"]["verdict"], written["reason"], "|log-prob of", "train with them:")
    assert sorted(told, key=shown.index) == list(told)
    assert (out / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    # The first copy is fp32 in the same batch shape.
    assert list(written["mismatch"][0]["by_timestep"].values()) == [0.0, 0.0, 0.0]
    rows = [(row["sampler"][:6], row["precision"], row["guidance"]) for row in written["mismatch"]]
    samplers = (("engine", "fp32"), ("copy o", "fp16"), ("copy o", "bf16"))
    assert set(rows) == {(*one, guidance) for one in samplers for guidance in (1.0, 4.5)}
    config = compose_config(["+calibration=fp32"], config_dir=str(out))
    correction = config.algorithm.rollout_correction
    assert correction.bypass_mode
    assert (correction.rollout_rs, correction.rollout_rs_threshold) == ("token_k1", "auto:4")

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert calibrate("--name", "fp32") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_the_file_of_another_loss(
    calibrate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    excluding = f"{KEY}.exclude_rejected=true"
    assert calibrate("rollout.dtype=bf16", "rollout.n=8", GUARD, excluding) == 0
    written = json.loads((tmp_path / "out" / "calibration.json").read_text())
    shown = capsys.readouterr().out
    chosen = written["settings"]
    composed = compose_config(["+calibration=measured"], config_dir=str(tmp_path / "out"))
    assert composed.algorithm.rollout_correction.bypass_mode
    assert chosen[f"{KEY}.exclude_rejected"] is None
    assert composed.actor.diffusion_loss.clip_ratio == chosen[CLIP] > 2e-6
    shares = written["clipped_before_update"]
    assert shares[f"{chosen[CLIP]:g}"] < 0.02 < 0.3 < shares["2e-06"]
    assert all(line in shown for line in (written["reason"], *written["notes"]))
    assert any(f"{excluding} does not go with bypass mode" in note for note in written["notes"])


@pytest.mark.slow
def test_the_file_of_a_loss_without_clip(calibrate: Callable[..., int], tmp_path: Path) -> None:
    assert calibrate(BYPASS, f"{KEY}.loss_type=reinforce", f"{KEY}.bypass_level=window") == 0
    written = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert (written["bound"], written["clipped_before_update"]) == (None, {})
    assert "actor" not in (tmp_path / "out" / "calibration" / "measured.yaml").read_text()


@pytest.mark.slow
def test_the_shortest_tail_whose_advantages_agree_is_written(
    calibrate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    window = ["rollout.algo.sde_window_size=1", "rollout.algo.sde_window_range=[0,1]"]
    assert calibrate("--tail", *window, "rollout.n=4", "rollout.algo.shared_prefix=true") == 0
    written = json.loads((tmp_path / "out" / "calibration.json").read_text())
    tails = [(row["tail"], row["tail_steps"]) for row in written["tails"]]
    steps = [("euler", 1), ("ab2", 1), ("euler", 2), ("ab2", 2), ("ab2", 3)]
    assert tails == steps
    good = [one["tail_steps"] for one in written["tails"] if (one["agreement"] or 0) >= 0.95]
    assert written["settings"].get("rollout.algo.tail_steps") == min(good, default=None)
    shown = capsys.readouterr().out
    assert "correlation of advantages" in shown
    assert all(note in shown for note in written["notes"])


@pytest.mark.slow
def test_the_cache_that_saves_most_and_agrees_is_written(
    calibrate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    settings = (f"model.path={assets.path('tiny_glyph_sd3')}", "rollout.n=4")
    window = ["rollout.algo.sde_window_size=1", "rollout.algo.sde_window_range=[0,1]"]
    assert calibrate("--cache", *settings, *window) == 0
    written = json.loads((tmp_path / "out" / "calibration.json").read_text())
    # Half of the four blocks, on two and one of three steps.
    tried = [(one["every"], one["window"], one["saved"]) for one in written["caches"]]
    assert tried == [(3, False, 1 / 3), (2, False, 1 / 6)]
    good = [one["every"] for one in written["caches"] if (one["agreement"] or 0) >= 0.95]
    assert written["settings"].get("rollout.cache.every") in (good or [None])
    assert "samples with blocks used again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--cache"], "rollout.cache.every has nothing to reuse"),
        (["--tail", "rollout.algo.sde_window_range=[1,4]"], "--tail: no step lies behind"),
        (["--mode", "both"], "--mode='both': allowed are auto, bypass, decoupled"),
        (["--prompts", "0"], "--prompts 0: give at least 1"),
        (["--name", "a/b"], "--name a/b"),
        (["data.replay_dir=/nowhere"], "calibrate measures an engine"),
        (["--prompts", "9"], "--prompts 9: data.train_files has 8"),
        ([f"rollout.name={ENGINES}.NanLogProbs"], "are nan or inf, at steps [1]"),
    ],
)
def test_bad_input_is_refused(
    calibrate: Callable[..., int],
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    assert calibrate(*given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token_grpo", "calibrate knows flow models"),
        ("tiny_ocr_nft", "there is no mismatch to calibrate for"),
    ],
)
def test_what_has_nothing_to_calibrate_is_refused(
    name: str, message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["calibrate", "--config-name", name, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


# --- The bundled model, whose rollout is bf16

QUICK = [
    "data.train_batch_size=4",
    "rollout.algo.shared_prefix=false",
    "rollout.dtype=bf16",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=16",
    "actor.train_n=null",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "reward.terms.ocr=null",
    "reward.terms.jpeg.weight=1.0",
    "rollout.val_kwargs.n=8",
    "trainer.device=cpu",
]
# One update of all samples, so that every ratio is that before any update.
ONE_UPDATE = [*QUICK, "actor.ppo_mini_batch_size=4", "trainer.total_training_steps=1"]


@pytest.mark.slow
@pytest.mark.kernels
def test_noise_is_not_clipped_with_the_written_settings(tmp_path: Path) -> None:
    out = tmp_path / "calibrated"
    assert main(["calibrate", "--prompts", "2", *QUICK, "--out", str(out)]) == 0
    measured = json.loads((out / "calibration.json").read_text())
    assert measured["diagnosis"]["cause"] is None
    assert measured["settings"][f"{KEY}.bypass_mode"] is True
    chosen = ["--config-dir", str(out), *ONE_UPDATE, "+calibration=measured"]
    assert main(["train", *chosen, f"trainer.output_dir={tmp_path / 'run'}"]) == 0
    row = read_rows(tmp_path / "run")[1]
    found = row["actor/rollout_corr/pre_update_clip_fraction"]
    assert found == row["actor/clip_fraction"] < 0.02
