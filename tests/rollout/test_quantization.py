"""Low precision: quantized and compiled replicas, the 8-bit optimizer, and what they need."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import Train, fingerprint, read_rows
from policies.test_flow import WINDOWS, make_spec, trained_lora
from torch import nn
from torch._dynamo.testing import CompileCounter
from training.test_update import make

from flowgrpo_rc import assets
from flowgrpo_rc.batch import Prompt, PromptBatch, concat
from flowgrpo_rc.cli import main
from flowgrpo_rc.config import check_engine
from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.models.base import FlowModel, ModelConfig, load_model
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.records.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest
from flowgrpo_rc.rollout.quantization import INT4_GROUP, PACKAGES, quantize, repeated_blocks
from flowgrpo_rc.rollout.replica import Replica
from flowgrpo_rc.training import optim
from flowgrpo_rc.training.config import ActorConfig
from flowgrpo_rc.training.optim import OptimConfig, make_optimizer
from flowgrpo_rc.training.update import PolicyUpdate

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs the extra `quantization`"
)
QUANTIZATIONS = tuple(PACKAGES)


@pytest.fixture
def bundled() -> FlowModel:
    """The bundled model, whose layers are wide enough for groups of 32 and tensors of 8 bits."""
    return load_model(ModelConfig(path=str(assets.path("tiny_glyph_sd3"))), torch.device("cpu"))


@pytest.fixture
def without_compiler() -> Iterator[None]:
    """torchao compiles its optimizer's step; what it computes is the same without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def largest_error(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Half a step of the format's grid around each weight; a whole one where the grid is not
    symmetric.
    """
    if name == "fp8":  # e4m3: three bits after the leading one; below 2^-6 of 448, steps of 2^-9
        smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-9
        return torch.maximum(weight.abs() / 16, smallest / 2)
    if name == "int4":
        groups = weight.unflatten(1, (-1, INT4_GROUP))
        return (groups.abs().amax(2, keepdim=True) / 7).expand_as(groups).flatten(1)
    return (weight.abs().amax(1, keepdim=True) / 127 / 2).expand_as(weight)


@needs_torchao
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_only_the_blocks_base_weights_are_quantized(bundled: FlowModel, name: str) -> None:
    network = trained_lora(bundled)
    before = fingerprint(network.state_dict())
    replica = Replica(network, "fp32", name).network
    own = dict(network.named_parameters())
    quantized = set()
    for key, parameter in replica.named_parameters():
        if type(parameter) is nn.Parameter:
            assert torch.equal(parameter, own[key])
        else:
            quantized.add(key.removesuffix(".weight"))
            error = (parameter.dequantize() - own[key]).abs()
            assert (error <= 1.001 * largest_error(name, own[key]) + 1e-9).all()
            assert error.max() > 0
    wanted = {
        module_name
        for module_name, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and "transformer_blocks." in module_name
        and "lora_" not in module_name
    }
    assert quantized == wanted
    assert "transformer_blocks.0.attn.to_q.base_layer" in quantized
    assert fingerprint(network.state_dict()) == before


@needs_torchao
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_lora_stays_separate(bundled: FlowModel, name: str) -> None:
    """A quantized replica is the network with rounded base weights and an exact LoRA, also after a
    sync.
    """
    network = trained_lora(bundled)
    replica = Replica(network, "fp32", name)
    rounded = copy.deepcopy(network)
    for (_, stored), parameter in zip(
        replica.network.named_parameters(), rounded.parameters(), strict=True
    ):
        parameter.data = stored.data if type(stored) is nn.Parameter else stored.dequantize()
    state = {key: parameter.detach() + 0.01 for key, parameter in lora_parameters(network).items()}
    replica.sync(state, 1)
    for key, parameter in lora_parameters(rounded).items():
        parameter.data = state[key].clone()
    inputs = (
        normal((8, 8, 16), [1, 2]),
        torch.tensor([900.0, 500.0]),
        bundled.encode(["A", "B"], max_sequence_length=16),
    )
    with torch.no_grad():
        found = bundled.velocity(replica.network, *inputs, None, 1.0)
        wanted = bundled.velocity(rounded, *inputs, None, 1.0)
        plain = bundled.velocity(network, *inputs, None, 1.0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-4)


@needs_torchao
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_the_rollout_says_its_precision_and_the_mismatch_shows_it(
    bundled: FlowModel, dtype: str, name: str
) -> None:
    network = trained_lora(bundled)
    engine = DiffusersEngine(bundled, network, dtype=dtype, chunk_size=4, quantization=name)
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=[Prompt(text='"AB7X"', index=0)], slots=[0]),
        samples_per_prompt=4,
        spec=make_spec("sde", 1.0, dtype=f"{dtype}+{name}"),
        window=torch.tensor(WINDOWS["all"] * 4),
        seeds=[1, 2, 3, 4],
    )
    batch = concat([chunk.batch for chunk in engine.generate(request)])
    assert batch.spec == request.spec
    difference = (
        (FlowPolicy(bundled, network).log_probs(batch, 4) - batch.rollout_log_probs).abs().mean()
    )
    assert 2e-5 < difference < (0.05 if name == "int4" else 5e-3)


@needs_torchao
def test_a_layer_that_int4_cannot_take() -> None:
    network = nn.Sequential(nn.ModuleList([nn.Linear(48, 32)]))
    with pytest.raises(
        ValueError, match=r"rollout\.quantization=int4 .* multiples of 32; the model has one of 48"
    ):
        quantize(network, "int4")


@needs_torchao
@pytest.mark.usefixtures("without_compiler")
def test_two_steps_with_an_int8_rollout_and_an_8_bit_optimizer(
    train: Train, tmp_path: Path
) -> None:
    settings = ("rollout.quantization=int8", "actor.optim.name=adamw_8bit", "model.lora_rank=64")
    assert train(*settings) == 0
    row = read_rows(tmp_path / "run")[1]
    assert 0 < row["rollout_corr/logprob_abs_diff_mean"] < 0.01


@needs_torchao
def test_text_with_an_int8_rollout(tmp_path: Path) -> None:
    settings = [
        "data.train_batch_size=2",
        "actor.ppo_mini_batch_size=2",
        "rollout.n=4",
        "rollout.val_kwargs.n=4",
    ]
    settings += [
        "actor.ppo_micro_batch_size_per_gpu=8",
        "trainer.total_training_steps=1",
        "trainer.device=cpu",
    ]
    run_dir = tmp_path / "run"
    command = ["train", "--config-name", "token_grpo", *settings, f"trainer.output_dir={run_dir}"]
    assert (
        main(
            [
                *command,
                "rollout.quantization=int8",
                "algorithm.rollout_correction.bypass_mode=false",
            ]
        )
        == 0
    )
    assert read_rows(run_dir)[1]["rollout_corr/logprob_abs_diff_mean"] > 0


def test_a_compiled_replica_computes_the_same(model: FlowModel) -> None:
    network, counter = trained_lora(model), CompileCounter()
    replicas = [Replica(network, "fp32", backend=backend).network for backend in (None, counter)]
    inputs = (
        normal((8, 8, 16), [1, 2]),
        torch.tensor([900.0, 500.0]),
        model.encode(["A", "B"], max_sequence_length=16),
    )
    with torch.no_grad():
        plain, compiled = (model.velocity(replica, *inputs, None, 1.0) for replica in replicas)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)
    assert counter.frame_count >= 1
    assert list(repeated_blocks(replicas[1])) == list(replicas[1].transformer_blocks)


# The 8-bit optimizer
# -------------------------------------------------------------------------------------------------


@needs_torchao
@pytest.mark.usefixtures("without_compiler")
def test_the_first_8_bit_step_is_that_of_adamw() -> None:
    """Moments are rounded after their use, so the first step is exact; they take a byte and a share
    of a scale each.
    """
    parameters = [nn.Parameter(normal((64, 128), [1], name)[0]) for name in "ab"]
    parameters[1].data.copy_(parameters[0])
    optimizers = []
    for parameter, name in zip(parameters, optim.OPTIMIZERS, strict=True):
        optimizers.append(
            make_optimizer([parameter], OptimConfig(name=name, lr=0.01, weight_decay=0.1))
        )
        parameter.grad = normal((64, 128), [2])[0]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.step()
        apart = (parameters[0] - parameters[1]).abs().max()
        assert apart < 1e-6 if step == 0 else 1e-6 < apart < 0.03
    stored = optim.optimizer_tensors(optimizers[1], {"p": parameters[1]})
    assert stored["p.exp_avg.codes"].dtype == torch.uint8
    assert stored["p.exp_avg.scale"].numel() == 64 * 128 // 256


@needs_torchao
@pytest.mark.usefixtures("without_compiler")
def test_8_bit_state_survives_a_checkpoint_bit_for_bit(
    bundled: FlowModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "SMALLEST_8BIT", 0)
    settings = OptimConfig(name="adamw_8bit", lr=1e-3, lr_scheduler="linear")
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=4, optim=settings)
    update, batch = make(bundled, actor)
    update.run(batch, 4)
    checkpoint = Checkpoint(step=1, tensors=update.tensors(), state={"update": update.state()})
    path = save_checkpoint(tmp_path, checkpoint, keep=1)
    update.run(batch, 4)
    wanted, state = fingerprint(update.lora_state()), update.state()
    loaded, processes = load_checkpoint(path), Processes(Accelerator(cpu=True))
    fresh = PolicyUpdate(
        FlowPolicy(bundled, bundled.transformer), actor, update._loss, processes, total_updates=10
    )
    fresh.load(loaded.tensors, loaded.state["update"])
    fresh.run(batch, 4)
    assert fingerprint(fresh.lora_state()) == wanted
    assert fresh.state() == state
    assert fingerprint(fresh.tensors()["optimizer"]) == fingerprint(update.tensors()["optimizer"])


@needs_torchao
def test_8_bits_for_small_tensors_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"adamw_8bit has no effect: the largest LoRA tensor has 16 .*model\.lora_rank",
    ):
        make_optimizer([nn.Parameter(torch.zeros(4, 4))], OptimConfig(name="adamw_8bit"))


# What they need
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.quantization=int3"],
            ["rollout.quantization='int3'", "int8, int4, fp8, int8_dynamic"],
        ),
        (["rollout.staleness=-1"], ["rollout.staleness=-1", "0 or more"]),
        (["rollout.staleness=1", "data.replay_dir=x"], ["rollout.staleness=1", "data.replay_dir"]),
        (
            ["rollout.quantization=int8", "data.replay_dir=x"],
            ["rollout.quantization=int8", "data.replay_dir"],
        ),
        (
            ["rollout.compile=true", "data.replay_dir=x"],
            ["rollout.compile=True", "data.replay_dir"],
        ),
        (["model.offload_idle=true"], ["model.offload_idle=true", "CPU"]),
        (["actor.optim.name=sgd"], ["actor.optim.name='sgd'", "adamw, adamw_8bit"]),
    ],
)
def test_settings_without_effect_or_meaning(
    train: Train, capsys: pytest.CaptureFixture, overrides: list[str], words: list[str]
) -> None:
    assert train(*overrides) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_what_is_not_installed(
    train: Train, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (check_engine, optim):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(check_engine.shutil, "which", lambda name: None)
    for override, words in (
        (
            "rollout.quantization=fp8",
            ["rollout.quantization=fp8 needs torchao", "flowgrpo-rc[quantization]"],
        ),
        ("actor.optim.name=adamw_8bit", ["adamw_8bit needs torchao", "flowgrpo-rc[quantization]"]),
        ("rollout.compile=true", ["rollout.compile=true", "C++ compiler"]),
    ):
        assert train(override) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("name", "kind", "wrong"),
    [
        ("vllm_engine", "causal_lm", {"quantization": "int8"}),
        ("vllm_engine", "causal_lm", {"compile": True}),
        ("transformers_engine", "causal_lm", {"compile": True}),
    ],
)
def test_an_engine_that_does_not_offer_it(name: str, kind: str, wrong: dict[str, object]) -> None:
    config = Config()
    config.model.kind, config.rollout.name = kind, name
    vars(config.rollout).update(wrong)
    with pytest.raises(ValueError, match=rf"rollout\.{next(iter(wrong))}.*rollout\.name={name}"):
        check_engine.engine_of(config)


def test_int4_on_a_gpu_takes_bf16(checkpoint: Path) -> None:
    config = Config()
    config.model.path = str(checkpoint)
    config.rollout.quantization, config.rollout.dtype = "int4", "fp16"
    with pytest.raises(
        ValueError, match=r"rollout\.quantization=int4 on a GPU needs rollout\.dtype=bf16, not fp16"
    ):
        check_engine.check_machine(config, torch.device("cuda"))
    check_engine.check_machine(config, torch.device("cpu"))
