"""The plan's peak: activations that are measured with fake tensors, phase by phase."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.marks import slow_but
from support.plans import QWEN, SD35, job
from support.runs import VIDEO
from support.subjects import make_subject
from support.tiny_models import TINY
from torch import nn

from flowgrpo_rc.models.base import adapters_by_pipeline
from flowgrpo_rc.models.lora import add_lora
from flowgrpo_rc.models.networks import transformers
from flowgrpo_rc.planning import activations
from flowgrpo_rc.planning.activations import PeakMemory, phase_bytes
from flowgrpo_rc.planning.fit import HEADROOM, Fitter, Line, gib_of
from flowgrpo_rc.planning.phases import phases
from flowgrpo_rc.planning.weights import CONTEXT, GAPS, beside_tensors, memory, on_the_host
from flowgrpo_rc.planning.work import counts
from flowgrpo_rc.rollout.replica import Replica

GIB = 2**30
BUNDLED = ("rollout.dtype=bf16", "actor.train_n=null", "actor.ppo_micro_batch_size_per_gpu=12")


def test_the_tracker_counts_what_is_alive_at_once() -> None:
    outside = torch.zeros(1000)
    with PeakMemory() as memory:
        view = outside[:10]  # of what was there before
        a = torch.zeros(100)  # 400 bytes
        b = a + view[:1]
        del a
        c = b.view(10, 10) * 2
        del b, c
    assert memory.peak == 800
    assert memory.bytes == 0


class Blocks(nn.Module):
    """Two kinds of blocks, of which each keeps activations of its own size."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(20)]
        narrow = [nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(30)]
        self.blocks = nn.ModuleList([*wide, *narrow, nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(network: Any) -> int:
    with PeakMemory() as memory:
        network(torch.empty(1000, 64)).square().mean().backward()
    return memory.peak


def test_few_blocks_tell_of_many() -> None:
    network = Blocks().to("meta")
    lengths = []

    def measured(blocks: Any) -> int:
        lengths.append(len(blocks.blocks))
        return trained(blocks)

    whole = activations.on_fakes(copy.deepcopy(network), trained)
    assert activations.measured(network, measured) == whole
    assert sorted(lengths) == [3, 4, 4, 5, 5]
    assert len(network.blocks) == 51
    assert network.blocks[0][0].weight.is_meta  # it is left as it was
    assert activations.measured(network, lambda uneven: len(uneven.blocks) ** 2) == 51**2


@pytest.mark.parametrize("name", slow_but(["FluxPipeline"], sorted(adapters_by_pipeline())))
def test_fake_tensors_find_what_real_ones_need(saved: Any, name: str) -> None:
    """With numbers in the tensors: the weights of each part, a rollout and an update."""
    guided = [f"rollout.pipeline.{key}={value}" for key, value in TINY[name].guided.items()]
    video = (*VIDEO, "reward.terms.ocr=null", "rollout.pipeline.num_frames=5")
    run = job(
        *("rollout.dtype=fp32", "rollout.algo.tail_steps=null", *guided),
        *(f"model.path={saved(name)}", "model.target_modules=null", "actor.steps_per_forward=1"),
        *("actor.ppo_micro_batch_size_per_gpu=4", *(video if TINY[name].num_frames else ())),
    )
    model = make_subject(name, saved).load()
    for part, size in run.network_bytes.items():
        network = getattr(model.pipeline, part)
        tensors = (*network.parameters(), *network.buffers())
        assert size == sum(tensor.nbytes for tensor in tensors), part
    add_lora(model, run.config.model, seed=0)
    network, *_ = transformers(model.network).values()
    spec = run.config.rollout.spec()
    *real, conditioning, negative = activations.blank_inputs(run.model, 4, spec)
    inputs = (*map(torch.zeros_like, real), conditioning, negative, spec)
    with torch.no_grad(), PeakMemory() as memory:
        model.velocity(network, *inputs)
    assert phase_bytes("rollout", run.spec, run.model, 4) == memory.peak
    for _ in range(2):  # the second finds gradients to add to
        with PeakMemory() as memory:
            model.velocity(network, *inputs).square().mean().backward()
    assert phase_bytes("update", run.spec, run.model, 4) == pytest.approx(memory.peak, rel=0.01)


NAMES = ("update", "rollout", "decoding", "evaluation", "shown")
ACTIVATIONS = dict(zip(NAMES, (5 * GIB, 2 * GIB, 3 * GIB, GIB, 4 * GIB), strict=True))


def sizes(*overrides: str, processes: int = 1) -> dict[str, int]:
    return {
        name: size for name, size, _ in phases(job(*overrides, processes=processes), ACTIVATIONS)
    }


def test_phases_follow_each_other() -> None:
    rollout = {"rollout": 2 * GIB, "decoding": 3 * GIB}
    trainer = {"update": 5 * GIB, "evaluation": 4 * GIB}  # decoding takes more than a forward
    assert sizes(SD35) == trainer | rollout
    assert sizes(SD35, "rollout.workers=1") == trainer
    never = ("trainer.val_before_train=false", "trainer.test_freq=-1")
    assert sizes(SD35, *never) == {"update": 5 * GIB} | rollout
    parts = job(SD35).network_bytes
    offloaded = sizes(SD35, "model.offload_idle=true")
    assert offloaded["decoding"] == 3 * GIB + parts["vae"]
    assert offloaded["evaluation"] == 4 * GIB + parts["vae"]
    encoders = sum(size for name, size in parts.items() if name.startswith("text_encoder"))
    assert offloaded["encoding"] == encoders


@pytest.mark.parametrize("offload", [False, True])
def test_a_first_pass_takes_the_place_of_the_transformer(offload: bool) -> None:
    """Text encoders are on the card before anything else but the VAE, and then no more."""
    settings = (SD35, f"model.offload_idle={str(offload).lower()}")
    plain, run = job(*settings), job(*settings, "model.prompt_cache=memory")
    vae = 0 if offload else run.network_bytes["vae"]
    rows = {name: size for name, size, _ in memory(run)}
    assert rows["text encoders, VAE"] == vae
    encoders = run.others - run.network_bytes["vae"]
    expected = {"first pass": encoders - sum(rows.values()) + vae, **sizes(*settings)}
    expected.pop("encoding", None)
    assert sizes(*settings, "model.prompt_cache=memory") == expected
    assert on_the_host(run)[0][1] == encoders + run.network_bytes["vae"] - vae
    assert [row[0] for row in counts(run) if row not in counts(plain)] == ["kept prompts"]


def test_evaluation_counts_at_its_own_size() -> None:
    large = job(*BUNDLED, "rollout.val_kwargs.height=64", "rollout.val_kwargs.width=128")
    decoding, shown = (
        phase_bytes(phase, large.spec, large.model, 1) for phase in ("decoding", "shown")
    )
    assert shown == pytest.approx(4 * decoding, rel=0.1)
    rows = {name: formula for name, _, formula in phases(large, ACTIVATIONS)}
    assert "of 64 x 128" in rows["evaluation"]
    (held_out,) = (row[1:] for row in counts(large) if "held-out" in row[0])
    assert held_out == ("10", "of 64 x 128 pixels, in an evaluation")


def test_an_engine_that_sleeps_counts_while_it_samples_and_else_on_the_host() -> None:
    engine = ("rollout.name=vllm_omni", "rollout.algo.noise_level=0.7")
    run = job(SD35, *engine)
    assert beside_tensors(run, 0)[0][1] == 2 * CONTEXT
    awake = sizes(SD35, *engine)
    asleep = sizes(SD35, *engine, "+rollout.engine_kwargs.sleep=true")
    whole = sum(run.network_bytes.values())
    assert asleep["rollout"] - awake["rollout"] == pytest.approx(whole, rel=0.03)
    assert asleep["decoding"] == awake["decoding"]
    qwen = job(QWEN, processes=4)
    rows = {name: size for name, size, _ in on_the_host(qwen)}
    assert rows["sleeping engines"] == rows["idle models"] + 4 * qwen.engine
    assert "sleeping engines" not in {name for name, _, _ in on_the_host(run)}


def test_what_a_card_needs_beside_tensors() -> None:
    """Two groups of processes have connections to both neighbours, each of 12 MiB, 32 times."""
    base = {"CUDA and libraries": CONTEXT, "gaps between tensors": int(GAPS * 5 * GIB)}
    for name, processes, gib in (("ddp", 1, None), ("ddp", 2, 0.75), ("fsdp2", 2, 1.5)):
        run = job(SD35, f"trainer.strategy={name}", processes=processes)
        found = {row: size for row, size, _ in beside_tensors(run, 5 * GIB)}
        assert found == base | ({"NCCL": gib * GIB} if gib else {})


def test_gradients_of_several_processes_are_copied() -> None:
    run = job("+experiment=sd35_medium_ocr_8xh100", processes=8)
    update, *_ = phases(run, dict.fromkeys(ACTIVATIONS, 1))
    assert update[1] == 4 * run.trained


@pytest.mark.parametrize(
    ("recipe", "processes", "blocks"),
    [
        (QWEN, 4, "transformer_blocks."),
        # The blocks of one of two transformers at a time.
        ("+experiment=wan22_t2v_a14b_ocr_8xh200", 8, "transformer_2.blocks."),
    ],
)
def test_split_weights_are_gathered_block_by_block(
    recipe: str, processes: int, blocks: str
) -> None:
    whole, split = (
        sizes(recipe, f"trainer.strategy={name}", processes=processes) for name in ("ddp", "fsdp2")
    )
    network = job(recipe, processes=processes).model.network
    stored = [*network.named_parameters(), *network.named_buffers()]
    size = {name: p.numel() * p.itemsize for name, p in stored if "lora_" not in name}
    outside = sum(number for name, number in size.items() if "blocks." not in name)
    block = sum(number for name, number in size.items() if f"{blocks}0." in name)
    assert split["update"] - whole["update"] == outside + 2 * block
    assert split["rollout"] == whole["rollout"]


def test_the_host() -> None:
    run = job("+experiment=sd35_medium_ocr_8xh100", "model.offload_idle=true", processes=8)
    rows = {name: size for name, size, _ in on_the_host(run)}
    parts = run.network_bytes
    idle = sum(parts.values()) - parts["transformer"]
    assert rows == {"idle models": 8 * idle, "while loading": 8 * idle + parts["transformer"]}


def test_what_is_split_or_quantized_is_whole_while_it_loads() -> None:
    weights = job(QWEN, processes=4).transformers
    assert sizes(QWEN, processes=4)["loading"] == weights - weights // 4
    assert "loading" not in sizes(QWEN, "trainer.strategy=ddp", processes=4)
    int8 = sizes(SD35, "rollout.quantization=int8")["loading"]
    assert 0.4 < int8 / job(SD35).transformers < 0.5  # 1 of 2 bytes
    assert "loading" not in sizes(SD35)


def test_reward_models_count() -> None:
    recipe = "+experiment=sd35_medium_pickscore_1xh100"
    options = "reward.terms.pickscore"

    def found(*overrides: str) -> dict[str, int]:
        rows = memory(job(recipe, *overrides))
        return {name: size for name, size, _ in rows if name.startswith("reward")}

    whole = found()["reward pickscore"]
    assert whole / GIB == pytest.approx(3.67, abs=0.01)  # of 986 million parameters in fp32
    assert found(f"+{options}.dtype=bf16") == {"reward pickscore": whole / 2}
    assert found(f"+{options}.device=cpu") == {}
    smaller = found(f"{options}=null", "+reward.terms.clip.weight=1")
    assert smaller == {"reward clip": pytest.approx(whole * 0.43, rel=0.01)}


def test_mixed_precision_normalizes_in_fp32_as_on_a_card() -> None:
    config = job("trainer.mixed_precision=bf16").config
    norms = (nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4))
    with activations.as_on_a_card(config):
        hidden = nn.Linear(4, 4)(torch.ones(2, 4))
        assert hidden.dtype == torch.bfloat16
        assert {norm(hidden).dtype for norm in norms} == {torch.float32}


def test_a_copy_in_another_precision_is_never_held_in_the_first_one() -> None:
    network: Any = Blocks().requires_grad_(False)
    network._keep_in_fp32_modules = None
    with PeakMemory() as memory:
        replica = Replica(network, "bf16")
    assert memory.peak <= 2 * sum(p.numel() for p in network.parameters())
    assert {p.dtype for p in replica.network.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in network.parameters()} == {torch.float32}


def test_a_card_gets_the_fastest_settings_that_fit() -> None:
    run = job(*BUNDLED)
    mebibytes = {"update": 400, "checkpointed": 80, "rollout": 100, "evaluation": 1, "decoding": 1}
    needs = {phase: Line(size * 2**20, size * 2**20) for phase, size in mebibytes.items()}
    fitter = Fitter(run, needs=needs)
    roomy = fitter.fit(80)
    nothing = fitter.fit(0.5)
    assert roomy.fits
    mini = run.spec.samples_per_mini_batch
    assert roomy.overrides == [
        "model.gradient_checkpointing=false",
        "model.offload_idle=false",
        f"model.decode_batch_size={min(run.spec.chunk_size, 4)}",
        f"rollout.micro_batch_size_per_gpu={run.spec.chunk_size}",
        f"actor.ppo_micro_batch_size_per_gpu={mini}",
    ]
    assert not nothing.fits
    assert "does not fit a card of 0.5 GiB" in str(nothing)
    order = [candidate.settings for candidate in fitter.candidates()]
    middle = [nothing.peak / GIB / (1 - HEADROOM) + extra for extra in (0.0, 0.1, 0.4, 2.0)]
    proposals = [fitter.fit(gib) for gib in middle]
    places = [order.index(proposal.spec.settings) for proposal in (*proposals, roomy)]
    assert places == sorted(places, reverse=True)
    assert len(set(places)) >= 4
    for proposal in proposals:
        assert mini % proposal.spec.config.actor.ppo_micro_batch_size_per_gpu == 0


@pytest.mark.parametrize(
    ("name", "free", "total", "gib"),
    [
        ("NVIDIA H100 80GB HBM3", 78.5, 79.2, 79.2),
        ("NVIDIA RTX 6000 Ada Generation", 40.0, 48.0, 40.8),  # others use some of it
        ("NVIDIA GeForce RTX 4090", 23.2, 23.5, 22.5),
        ("AMD Radeon RX 7900 XTX", 24.0, 24.0, 23.0),
    ],
)
def test_the_card_of_this_machine(monkeypatch, name, free, total, gib) -> None:
    assert gib_of("24GB") == 24
    with pytest.raises(ValueError, match="--fit: no GPU is visible; give the GiB"):
        gib_of("card")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = int(free * GIB), int(total * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert gib_of("card") == gib
