"""Batches of earlier iterations: how many are held, and how a checkpoint gives them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowgrpo_rc.batch import Batch, Conditioning, DiffusionBatch, TokenBatch, TokenSpec
from flowgrpo_rc.records.checkpoint import (
    OF_PROCESS,
    STAGING,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from flowgrpo_rc.records.earlier_batches import EarlierBatches, check_processes
from flowgrpo_rc.rollout.config import RolloutConfig

SIGMAS = torch.linspace(1, 0, 5)
CPU = torch.device("cpu")


def images(number: int) -> DiffusionBatch:
    """Makes a batch that holds `number`, with what is optional left out or not contiguous."""
    latents = torch.full((2, 4, 3, 3, 3), float(number)).transpose(0, 1)[:2]
    return DiffusionBatch(
        spec=RolloutConfig().spec(),
        group=torch.tensor([number, number]),
        seed=torch.tensor([2 * number, 2 * number + 1]),
        policy_version=torch.full((2,), number),
        rollout_log_probs=torch.tensor([[0.1, torch.nan, 0.3], [torch.inf, 0.2, 0.1]]),
        all_latents=latents,
        all_timesteps=torch.ones(2, 3),
        step_indices=torch.arange(3).expand(2, 3),
        sigmas=SIGMAS,
        conditioning=Conditioning(embeds=torch.randn(1, 2, 4), mask=torch.tensor([[True, False]])),
        prompt_index=torch.zeros(2, dtype=torch.int64),
    )


def texts(number: int) -> TokenBatch:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    return TokenBatch(
        spec=TokenSpec(dtype="bf16", temperature=1.0, prompt_length=2, response_length=3),
        group=torch.tensor([number, number]),
        seed=torch.tensor([0, 1]),
        policy_version=torch.full((2,), number),
        rollout_log_probs=torch.randn(2, 3),
        prompt_ids=torch.ones(2, 2, dtype=torch.int64),
        prompt_mask=torch.ones(2, 2, dtype=torch.bool),
        response_ids=torch.full((2, 3), number),
        response_mask=mask,
    )


def filled(limit: int, batches: list[Batch], *, mask: bool = True) -> EarlierBatches:
    held = EarlierBatches(limit)
    for batch in batches:
        advantages = torch.randn(2, 1).expand(2, 3)
        held.add(batch, advantages, batch.step_mask if mask else None)
    return held


def assert_equal(one: Batch, other: Batch) -> None:
    columns, others = one.per_sample(), other.per_sample()
    assert columns.keys() == others.keys()
    assert one.spec == other.spec
    for name, value in columns.items():
        assert value.dtype == others[name].dtype
        assert value.stride() == others[name].stride()
        assert torch.equal(value.nan_to_num(nan=7.0), others[name].nan_to_num(nan=7.0))


def test_the_newest_are_held_and_the_oldest_go() -> None:
    held = filled(2, [images(1), images(2), images(3)])
    assert [int(batch.group[0]) for batch in held.newest_first()] == [3, 2]
    assert filled(0, [images(1)]).newest_first() == []


@pytest.mark.parametrize("make", [images, texts])
def test_a_checkpoint_gives_every_process_its_batches_back(tmp_path: Path, make: object) -> None:
    """The batches share their schedule, which a file would not allow."""
    assert callable(make)
    processes = [filled(2, [make(1 + p), make(5 + p)], mask=p == 0) for p in (0, 1)]
    files = [held.save(tmp_path / STAGING, rank, 2) for rank, held in enumerate(processes)]
    assert files[0] == files[1]
    tensors = {"lora": {"a": torch.ones(2)}}
    checkpoint = Checkpoint(step=3, tensors=tensors, state={}, files=files[0])
    path = save_checkpoint(tmp_path, checkpoint, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]
    loaded = load_checkpoint(path)
    assert loaded.tensors.keys() == {"lora"}
    for rank, held in enumerate(processes):
        resumed = EarlierBatches(2)
        resumed.load(loaded.files, rank, CPU)
        wanted = held.newest_first()
        found = resumed.newest_first()
        assert len(found) == len(wanted) == 2
        for batch, other in zip(found, wanted, strict=True):
            assert_equal(batch, other)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    files = filled(1, [images(1)]).save(tmp_path / STAGING, 0, 1)
    path = save_checkpoint(tmp_path, Checkpoint(step=1, tensors={}, state={}, files=files), keep=1)
    (file,) = path.glob(f"{OF_PROCESS}*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=file.name):
        load_checkpoint(path)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    files = filled(1, [images(1)]).save(tmp_path, 1, 2)
    check_processes(files, 2)
    check_processes([], 3)
    with pytest.raises(ValueError, match=r"rollout\.reuse\) of 2 process.*and 1 would go on"):
        check_processes(files, 1)


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        filled(1, [images(1)]).save(tmp_path / "file", 0, 1)
