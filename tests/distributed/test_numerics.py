"""Kernels that give the same bits each time, and products in TF32, are asked for before CUDA."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.runs import Train
from torch.utils._python_dispatch import TorchDispatchMode

from flowgrpo_rc.cli import main
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.distributed.numerics import convolving_in_tf32, rounds_to_tf32, set_numerics
from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.rollout.config import RolloutConfig


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be removed")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fill = torch.utils.deterministic.fill_uninitialized_memory
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    tf32 = [backend.allow_tf32 for backend in backends]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    for backend, allowed in zip(backends, tf32, strict=True):
        backend.allow_tf32 = allowed


class Unrepeatable(TorchDispatchMode):
    """Collects the calls that torch.use_deterministic_algorithms documents as refused on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        floating = args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
        if (
            name in ("put", "put_", "histc", "nll_loss_forward", "nll_loss2d_forward")
            or (name in ("median", "nanmedian") and "dim" in func._overloadname)
            or (name in ("cumsum", "cumsum_") and floating)
            or (name == "bincount" and len(args) > 1 and args[1] is not None)
        ):
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_no_call_of_a_run_is_refused_in_deterministic_mode(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where CUDA has started, as by a library that asks what the card can do."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    calls = Unrepeatable()
    with calls:
        assert train("trainer.deterministic=true", "trainer.tf32=true") == 0
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.matmul.allow_tf32
    assert calls.names == set()


@pytest.mark.slow
def test_no_call_of_a_text_run_is_refused(tmp_path: Path) -> None:
    settings = [
        *("data.train_batch_size=4", "rollout.n=2", "actor.ppo_micro_batch_size_per_gpu=8"),
        *("actor.ppo_mini_batch_size=4", "rollout.micro_batch_size_per_gpu=8"),
        *("trainer.total_training_steps=1", "trainer.val_before_train=false"),
        *("trainer.deterministic=true", f"trainer.output_dir={tmp_path}"),
    ]
    calls = Unrepeatable()
    with calls:
        assert main(["train", "--config-name", "token_grpo", *settings]) == 0
    assert calls.names == set()


def test_a_call_that_is_refused_is_seen() -> None:
    calls = Unrepeatable()
    with calls:
        torch.rand(3).cumsum(0)
        torch.rand(2, 3).median(1)
    assert calls.names == {"aten.cumsum.default", "aten.median.dim"}


def test_every_flag_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    set_numerics(deterministic=True, tf32=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert [rounds_to_tf32(dtype) for dtype in ("fp32", "fp32+int8", "bf16")] == [True, True, False]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_numerics(deterministic=True, tf32=False)
    assert not rounds_to_tf32("fp32")  # whoever asked for it before
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # that of a user is kept


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_of_a_decoding_round_to_tf32(
    model: FlowModel, monkeypatch: pytest.MonkeyPatch, tf32: bool, deterministic: bool
) -> None:
    """Products do not, nor convolutions elsewhere. A thread may run in both, which costs bits."""
    set_numerics(deterministic=deterministic, tf32=tf32)
    vae, seen = model.pipeline.vae, []
    decode = vae.decode

    def noting(*given: object, **options: object) -> object:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return decode(*given, **options)

    monkeypatch.setattr(vae, "decode", noting)
    model.decode(normal((8, 4, 8), [1]), RolloutConfig().spec())
    assert seen == [(tf32 or not deterministic, tf32)]
    with suppress(KeyError), convolving_in_tf32():
        raise KeyError("x")
    assert torch.backends.cudnn.allow_tf32 is tf32
