"""Whole runs mix no devices, and wait for the device only where they have to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.marks import slow_but
from support.runs import read_rows, without_timings
from support.tagged_runs import (
    IMAGES,
    MICRO_BATCH,
    OPTIMIZER_STEP,
    ROLLOUT,
    STOCHASTIC_STEP,
    TEXT,
    train,
    two_ranks,
    waits,
    wrong,
)

from flowgrpo_rc.batch import TokenBatch
from flowgrpo_rc.policies.base import Evaluation
from flowgrpo_rc.policies.token import TokenPolicy

RC = "algorithm.rollout_correction"
DECOUPLED = (*IMAGES, f"{RC}.bypass_mode=false", f"{RC}.rollout_is=token")
RUNS = {
    "bypass": IMAGES,
    "old weights": (
        *(*DECOUPLED, "rollout.staleness=1", "actor.use_kl_loss=true"),
        *("model.quantization=int4", "model.offload_idle=true"),
    ),
    "some of the samples": (
        *(*IMAGES, f"{RC}.rollout_rs=step_kl", f"{RC}.rollout_rs_threshold=auto:4"),
        *("actor.train_n=1", "actor.ppo_micro_batch_size_per_gpu=1"),
        *("model.quantization=nf4", "model.prompt_cache=memory"),
    ),
    "int8 and fp32": (*IMAGES, "model.quantization=int8", "rollout.dtype=fp32"),
}


@pytest.mark.parametrize("name", slow_but(["bypass"], RUNS))
def test_images(name: str, tmp_path: Path) -> None:
    record = train(tmp_path, RUNS[name])
    assert wrong(record) == []
    assert record.entered.keys() == {MICRO_BATCH, OPTIMIZER_STEP, ROLLOUT, STOCHASTIC_STEP}
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["null", "int8"])
def test_layers_on_the_host(quantization: str, tmp_path: Path) -> None:
    """They are sent for each product, without a wait, and no bit of a metric changes."""
    shared = (*IMAGES, "model.dtype=bf16", "model.gradient_checkpointing=true")
    found = []
    for idle in ("true", "layers"):
        own = (f"model.quantization={quantization}", f"model.offload_idle={idle}")
        record = train(tmp_path / idle, (*shared, *own))
        sent = [line for line in wrong(record) if "to device" in line and "quantization.py" in line]
        assert wrong(record) == sent
        assert len(sent) == (idle == "layers")
        found.append(without_timings(read_rows(tmp_path / idle)))
    assert found[0] == found[1]


def test_text(tmp_path: Path) -> None:
    record = train(tmp_path, TEXT)
    # transformers reads the mask, to leave it out if it hides nothing.
    assert wrong(record, waits_of_network=2) == []
    assert waits(record) == {"masking_utils.py: _ignore_causal_mask_sdpa"}
    assert record.entered.keys() == {MICRO_BATCH, OPTIMIZER_STEP}
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
def test_padding_is_cut_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows how long responses are, of 32 tokens at most."""
    lengths = []
    evaluate = TokenPolicy.evaluate

    def followed(self: TokenPolicy, piece: TokenBatch) -> Evaluation:
        hook = self.network.register_forward_pre_hook(
            lambda module, args, options: lengths.append(options["logits_to_keep"]),
            with_kwargs=True,
        )
        with hook:
            return evaluate(self, piece)

    monkeypatch.setattr(TokenPolicy, "evaluate", followed)
    ragged = ("rollout.response_length=32", "actor.ppo_micro_batch_size_per_gpu=2")
    record = train(tmp_path, (*TEXT, *ragged, f"{RC}.bypass_mode=false"))
    assert wrong(record, waits_of_network=2) == []
    assert waits(record) == {"masking_utils.py: _ignore_causal_mask_sdpa"}
    assert min(lengths) < 16
    assert len(set(lengths)) > 1


@pytest.mark.slow
def test_a_resumed_run(tmp_path: Path) -> None:
    assert wrong(train(tmp_path, (*IMAGES, "trainer.max_time=0.001"), code=75)) == []
    assert wrong(train(tmp_path, IMAGES)) == []
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [IMAGES, DECOUPLED], ids=["bypass", "decoupled"])
def test_collectives_get_tensors_of_the_device(settings: tuple[str, ...], tmp_path: Path) -> None:
    with two_ranks():
        record = train(tmp_path, settings)
    assert wrong(record) == []
