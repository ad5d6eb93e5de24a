"""An iteration and its checkpoint on a device other than the host.

Tensors of the meta device hold no numbers. As on any other device, an operation on one of them and
a tensor of the host is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from support.builders import diffusion_batch
from torch import Tensor

from flowgrpo_rc.batch import DiffusionBatch
from flowgrpo_rc.core.reduce import identity
from flowgrpo_rc.correction.auto_bands import AutoBands
from flowgrpo_rc.correction.thresholds import parse_bands
from flowgrpo_rc.distributed.processes import Processes
from flowgrpo_rc.monitoring.expected_mismatch import ExpectedMismatch
from flowgrpo_rc.monitoring.mismatch import MismatchMonitor
from flowgrpo_rc.policies.flow import FlowPolicy

META = torch.device("meta")


class Anything(FlowPolicy):
    """A policy that returns some log-probs and does not look at the numbers of the schedule."""

    def cell_names(self, batch: DiffusionBatch) -> Sequence[str]:
        return ["ts_1000", "ts_667", "ts_333"]

    def log_probs(self, batch: DiffusionBatch, micro_batch_size: int) -> Tensor:
        return torch.randn_like(batch.step_indices, dtype=torch.float32)


@pytest.fixture
def batch() -> DiffusionBatch:
    """A batch [4, 2]."""
    with META:
        return diffusion_batch(torch.zeros(4, 2), old_log_probs=torch.zeros(4, 2))


@pytest.fixture
def processes() -> Processes:
    made = Processes(Accelerator(cpu=True))
    made.device = META
    return made


def on_device(tensors: Mapping[str, Tensor]) -> bool:
    """Returns the tensors that are on the device; sizes are on the host."""
    return all(
        tensor.device == META for name, tensor in tensors.items() if not name.endswith(".sizes")
    )


def test_two_devices_are_an_error(batch: DiffusionBatch) -> None:
    with pytest.raises(RuntimeError, match="device"):
        torch.cat([batch.old_log_probs, torch.zeros(4, 2)])


@pytest.mark.parametrize("iterations", [0, 2])
def test_auto_bands(batch: DiffusionBatch, iterations: int) -> None:
    bands = AutoBands(parse_bands("token_k1,step_kl,seq_mean_k1", "auto:4"), 3, META)
    for _ in range(iterations):
        bands.judge(batch, batch.old_log_probs, batch.old_log_probs)
        bands.finish(identity)
    found = bands.tensors()
    assert len(found) == 9
    assert on_device(found)


def test_the_mismatch_monitor(batch: DiffusionBatch, processes: Processes) -> None:
    model = SimpleNamespace(networks=("transformer",))
    policy = Anything(model, None)  # type: ignore[arg-type]
    expected = ExpectedMismatch(policy, policy, processes, size=1.0, least=4e-7, micro_batch_size=2)
    floor = MismatchMonitor(policy, processes, clip_ratio=1e-4, expected=expected)
    floor.expect(batch, 1)
    floor.before_update(batch, policy.log_probs(batch, 2))
    floor.after_update(batch, policy.log_probs(batch, 2))
    floor.finish(old_is_rollout=True)
    assert on_device(floor.tensors())
    assert floor.tensors()
